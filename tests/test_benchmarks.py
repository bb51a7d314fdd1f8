# SPDX-License-Identifier: Apache-2.0
"""The benchmarks start, count and draw right. What they measure is not tested."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import bench_crossover
import bench_ops
import bench_quality
import common
import engines
import pytest
import served_arm
import serving

BENCHMARKS = Path(common.__file__).parent
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("bench_*.py"))
PNG = b"\x89PNG\r\n\x1a\n"


def run_script(name, *arguments):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        cwd=common.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def last_line(stdout):
    return json.loads(stdout.splitlines()[-1])


# What all share


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_needs_neither_torch_nor_vllm(name):
    code = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['vllm'] = None;"
        f"sys.path.insert(0, {str(BENCHMARKS)!r});"
        f"sys.argv = [{name!r}, '--help'];"
        f"runpy.run_path({str(BENCHMARKS / name)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=common.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout


def test_readme_explains_every_script():
    text = (BENCHMARKS / "README.md").read_text()
    scripts = {path.name for path in BENCHMARKS.glob("bench_*")}
    assert {name for name in scripts if text.count(name) >= 2} == scripts


def test_medians_and_ratios():
    slow, fast = [4.0, 2.0, 9.0], [2.0, 2.0, 3.0]
    assert common.summarize(slow) == {"median": 4.0, "min": 2.0, "max": 9.0}
    # Of the medians; the range is that of the rounds.
    assert common.compare(slow, fast) == {"median": 2.0, "min": 1.0, "max": 3.0}
    with pytest.raises(ValueError):
        common.compare([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    "share, expected", [(0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100), (0.001, 1)]
)
def test_percentile_is_a_value_that_occurred(share, expected):
    assert common.percentile(list(range(100, 0, -1)), share) == expected


@pytest.mark.parametrize(
    "number, t", [(5, 2.7764), (6, 2.5706), (10, 2.2622), (30, 2.0452)]
)
def test_interval_is_that_of_students_t(number, t):
    values = [float(n) for n in range(number)]
    half = t * statistics.stdev(values) / number**0.5
    found = common.mean_with_interval(values)
    assert found["mean"] == statistics.fmean(values)
    assert found["high"] - found["mean"] == pytest.approx(half, rel=0.003)
    assert found["mean"] - found["low"] == pytest.approx(half, rel=0.003)


def test_every_call_takes_its_turn():
    turns = []
    seconds = common.measure_interleaved(
        {name: lambda name=name: turns.append(name) for name in "ab"}, 3, "turns"
    )
    assert turns == list("ab" * 4), "one turn of them warms up"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_table_is_markdown():
    table = common.format_table(("arm", "x"), [("stock", 1.23456), ("a", None)])
    assert table.splitlines() == [
        "| arm   |    x |",
        "| ----- | ---- |",
        "| stock | 1.23 |",
        "| a     |    - |",
    ]


def test_result_is_the_last_line_and_the_file(tmp_path, capsys):
    parser = bench_ops.build_parser()
    args = parser.parse_args(["--output", str(tmp_path / "r.json")])
    common.write_result(args, {"x": [1.23456789, {"n": 3}]}, draw=lambda *_: None)
    assert last_line(capsys.readouterr().out) == {"x": [1.235, {"n": 3}]}
    assert common.read_result(tmp_path / "r.json") == {"x": [1.235, {"n": 3}]}


def test_a_result_that_cannot_be_written_is_refused_first(tmp_path):
    done = run_script("bench_ops.py", "--output", str(tmp_path / "no" / "r.json"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: the folder of ")
    assert len(done.stderr.splitlines()) == 1


def test_a_file_without_a_result_is_named(tmp_path):
    (tmp_path / "r.json").write_text("[")
    with pytest.raises(common.UsageError, match="r.json"):
        common.read_result(tmp_path / "r.json")


# Operators


@pytest.fixture(scope="module")
def ops_run(tmp_path_factory):
    """All groups on a cache of a few blocks."""
    folder = tmp_path_factory.mktemp("ops")
    sizes = "--layers 2 --requests 2 --kv-len 160 --prompt-len 65 --evict-requests 3"
    done = run_script(
        "bench_ops.py",
        *sizes.split(),
        *("--budget-tokens", "96", "--repeats", "2", "--copy-mib", "1"),
        *("--plot", str(folder / "ops.png"), "--output", str(folder / "ops.json")),
    )
    assert done.returncode == 0, done.stderr
    return folder, last_line(done.stdout)


@pytest.mark.slow
def test_ops_are_timed_beside_attention(ops_run):
    folder, result = ops_run
    assert result == common.read_result(folder / "ops.json")
    assert (folder / "ops.png").read_bytes().startswith(PNG)
    rows = {(row["group"], row["kv_len"], row["name"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"])
    assert {group for group, *_ in rows} == {"decode", "prefill", "eviction"}
    for row in rows.values():
        assert 0 < row["ms"]["min"] <= row["ms"]["median"] <= row["ms"]["max"]
        expected = row["mib"] * 2**20 / (row["ms"]["median"] * 1e6)
        assert row["gb_per_s"] == pytest.approx(expected, rel=0.01)
        share = row["gb_per_s"] / row["copy_gb_per_s"]
        assert row["share_of_copy"] == pytest.approx(share, rel=0.01)
        if row["baseline"] is not None:
            base = rows[row["group"], row["kv_len"], row["baseline"]]
            ratio = row["ms"]["median"] / row["steps"] / base["ms"]["median"]
            assert row["ratio"]["median"] == pytest.approx(ratio, rel=0.01)
    # 2 requests x 160 tokens x 2 layers x 3 KV heads x (K and V of 64 bf16).
    assert rows["decode", 160, "attention (vLLM)"]["mib"] == pytest.approx(
        2 * 160 * 2 * 3 * 256 / 2**20, rel=0.001
    )


@pytest.mark.slow
def test_ops_are_held_to_their_references(ops_run):
    checks = {check["name"]: check for check in ops_run[1]["checks"]}
    assert {"score_keys", "reset_slots", "select_keep", "compact_kv"} <= set(checks)
    for check in checks.values():
        assert check["score_error"] <= bench_ops.SCORE_TOLERANCE
        assert check["cpu_ms"] > 0 and check["reference_ms"] > 0


def test_heads_that_do_not_divide_are_refused(tmp_path):
    done = run_script("bench_ops.py", "--query-heads", "4", "--kv-heads", "3")
    assert done.returncode == 2
    assert "4 query heads" in done.stderr


# Quality


def quality_args(*more):
    start = ["--articles", "a.jsonl", "--num-articles", "5"]
    return bench_quality.build_parser().parse_args([*start, *more])


def test_settings_that_a_policy_ignores_are_measured_once():
    args = quality_args(
        *("--policies", "keyformer", "streaming", "full", "--budgets", "0.5", "300"),
        *("--score-queries", "all", "last:32", "stride:4"),
    )
    assert list(bench_quality.list_settings(args)) == [
        "keyformer 0.5 all",
        "keyformer 0.5 last:32",
        "keyformer 0.5 stride:4",
        "keyformer 300 all",
        "keyformer 300 last:32",
        "keyformer 300 stride:4",
        "streaming 0.5",
        "streaming 300",
        "full",
    ]


@pytest.mark.parametrize(
    "option, value, named",
    [
        ("--policies", "best", "kv_policy"),
        ("--score-queries", "some", "kv_score_queries"),
        ("--budgets", "1.5", "kv_budget"),
    ],
)
def test_settings_that_the_server_refuses_are_refused(option, value, named):
    with pytest.raises(common.UsageError, match=named):
        bench_quality.list_settings(quality_args(option, value))


def test_articles_below_the_budget_are_counted():
    args = quality_args("--new-tokens", "8")
    values = bench_quality.list_settings(args)["keyformer 0.5 all"]
    prompts = [[0] * length for length in (80, 88, 89, 400)]
    # Computed at last: length + 7; a block of 32 goes once that is 64 + 32.
    assert bench_quality.count_evicting(values, prompts, args) == 2


@pytest.fixture
def fake_engine(monkeypatch):
    """Settings that were replayed; the shares are made up."""
    import transformers

    import tests.quality

    replayed = []

    def replay(args, values, prompts, answers, description):
        name = bench_quality.name_setting(values)
        if name.endswith("stride:8"):
            raise KeyboardInterrupt
        replayed.append(name)
        drop = 0.1 if "stride" in name else 0.0
        return [0.8 + 0.02 * index - drop for index in range(5)]

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: None)
    monkeypatch.setattr(
        tests.quality, "article_prompts", lambda *_: [[0] * 400 for _ in range(5)]
    )
    monkeypatch.setattr(
        bench_quality, "answer_in_full", lambda *_: replayed.append("answers") or [[1]]
    )
    monkeypatch.setattr(bench_quality, "replay_setting", replay)
    return replayed


def test_an_interrupted_quality_run_is_continued(tmp_path, fake_engine):
    output = ("--output", str(tmp_path / "q.json"))
    queries = ("--score-queries", "all", "stride:4")
    with pytest.raises(KeyboardInterrupt):
        bench_quality.measure(quality_args(*output, *queries, "stride:8"))
    assert fake_engine == ["answers", "keyformer 0.5 all", "keyformer 0.5 stride:4"]
    fake_engine.clear()
    result = bench_quality.measure(quality_args(*output, *queries, "stride:16"))
    assert fake_engine == ["keyformer 0.5 stride:16"]
    first, second, _ = result["arms"]
    assert first["agreement"]["mean"] == pytest.approx(0.84)
    assert first["agreement"]["low"] < 0.84 < first["agreement"]["high"]
    # Article by article the drop is always the same: no interval.
    assert second["difference"] == pytest.approx(
        {"mean": -0.1, "low": -0.1, "high": -0.1}
    )
    table = bench_quality.format_arms(result["arms"])
    assert "| keyformer 0.5 stride:4" in table and "5/5" in table
    bench_quality.draw(result, tmp_path / "q.png")
    assert (tmp_path / "q.png").read_bytes().startswith(PNG)


def test_answers_of_other_articles_are_not_taken(tmp_path, fake_engine):
    output = ("--output", str(tmp_path / "q.json"))
    bench_quality.measure(quality_args(*output))
    with pytest.raises(common.UsageError, match="another --new-tokens"):
        bench_quality.measure(quality_args(*output, "--new-tokens", "9"))
    fake_engine.clear()
    bench_quality.measure(quality_args(*output, "--new-tokens", "9", "--fresh"))
    assert fake_engine == ["answers", "keyformer 0.5 all"]


# Arms


@pytest.mark.parametrize(
    "text, settings",
    [
        ("off", None),
        ("keyformer:0.5", {"policy": "keyformer", "budget": 0.5}),
        ("h2o:300", {"policy": "h2o", "budget": 300}),
        (
            "keyformer:0.5:score_mode=fused,score_queries=stride:4,min_tokens=64",
            {
                "policy": "keyformer",
                "budget": 0.5,
                "score_mode": "fused",
                "score_queries": "stride:4",
                "min_tokens": 64,
            },
        ),
    ],
)
def test_arms_are_spelled_as_the_help_says(text, settings):
    assert engines.parse_arm(text) == settings


@pytest.mark.parametrize(
    "text, named",
    [
        ("keyformer", "'' is not a budget"),
        ("keyformer:half", "'half' is not a budget"),
        ("best:0.5", "kv_policy"),
        ("keyformer:0.5:fused", "'fused' is not SETTING=VALUE"),
        ("keyformer:0.5:=1", "'=1' is not SETTING=VALUE"),
        ("keyformer:0.5:colour=1", "colour"),
    ],
)
def test_arms_that_no_server_would_take_are_refused(text, named):
    with pytest.raises(common.UsageError, match=named):
        engines.parse_arm(text)


def test_prompts_depend_on_seed_and_name_only():
    one = engines.random_prompt(0, 1, 50, 100)
    assert one == engines.random_prompt(0, 1, 50, 100)
    assert one != engines.random_prompt(0, 2, 50, 100)
    assert one != engines.random_prompt(1, 1, 50, 100)
    assert len(one) == 50 and min(one) >= 3 and max(one) < 100


# Crossover


def crossover_args(*options):
    args = bench_crossover.build_parser().parse_args(options)
    bench_crossover.apply_preset(args)
    return args


@pytest.mark.parametrize(
    "preset, workload, pools",
    [
        ("off", (4, 1024, 128), {4: 145}),
        ("ample", (8, 4096, 128), {8: 8 * 132 + 1}),
        ("tight", (24, 2048, 512), {4: 4 * 80 + 1}),
        ("prefill-bound", (24, 2048, 64), {4: 4 * 66 + 1}),
        ("admission", (16, 512, 128), {4: 4 * 20 + 1}),
        (
            "crossover",
            (16, 2048, 512),
            {pool: pool * 80 + 1 for pool in (16, 12, 8, 6, 4, 2)},
        ),
        (
            "crossover",
            (16, 2048, 64),
            {pool: pool * 66 + 1 for pool in (16, 12, 8, 6, 4, 2)},
        ),
    ],
)
def test_presets_have_the_pools_they_name(preset, workload, pools):
    points = bench_crossover.list_points(crossover_args("--preset", preset))
    points = [point for point in points if point.new_tokens == workload[2]]
    assert {(p.requests, p.prompt_len, p.new_tokens) for p in points} == {workload}
    assert {point.pool: point.num_blocks(32) for point in points} == pools


def test_every_preset_is_counted():
    assert set(bench_crossover.PRESETS) == {
        *("off", "ample", "tight", "prefill-bound", "admission", "crossover")
    }


@pytest.mark.parametrize(
    "arm, held, running",
    [
        # The last of 2,560 tokens is never written; 80 blocks hold the others.
        ("off", 80, 4),
        ("stock", 80, 4),
        ("keyformer:1.0", 80, 4),
        # k = 1,024: 33 blocks held at most; 320 blocks, 64 of them for a prompt.
        ("keyformer:0.5", 33, 8),
        ("keyformer:0.25", 17, 16),
    ],
)
def test_blocks_expected_of_a_tight_pool(arm, held, running):
    args = crossover_args("--preset", "tight", "--arm", arm)
    (point,) = bench_crossover.list_points(args)
    (spec,) = bench_crossover.list_specs(args, point)
    capacity = bench_crossover.expect(point, spec, 32)
    assert (capacity.prompt_blocks, capacity.held_blocks) == (64, held)
    assert capacity.running == running


def test_scale_shrinks_all_lengths_and_the_floor_of_the_budget():
    args = crossover_args(
        *("--preset", "tight", "--scale", "0.25", "--arm", "keyformer:0.25"),
        *("--arm", "keyformer:0.25:min_tokens=99", "--arm", "off"),
    )
    (point,) = bench_crossover.list_points(args)
    assert (point.prompt_len, point.new_tokens, point.pool) == (512, 128, 4)
    specs = bench_crossover.list_specs(args, point)
    scaled, own, off = (spec.policy() for spec in specs)
    assert (scaled["min_tokens"], own["min_tokens"], off) == (64, 99, None)
    # So that a budget of 0.25 is still one.
    assert bench_crossover.expect(point, specs[0], 32).budget_tokens == 128


def test_options_win_over_the_preset_and_span_a_grid():
    args = crossover_args(
        *("--preset", "tight", "--requests", "6", "12", "--prompt-len", "64", "96"),
        *("--new-tokens", "32", "--pool", "all", "6", "2", "--arm", "off"),
    )
    points = bench_crossover.list_points(args)
    # Of 6 requests, `all` and 6 are the same pool.
    assert [(p.prompt_len, p.requests, p.pool) for p in points] == [
        *((64, 6, 6), (64, 6, 2), (64, 12, 12), (64, 12, 6), (64, 12, 2)),
        *((96, 6, 6), (96, 6, 2), (96, 12, 12), (96, 12, 6), (96, 12, 2)),
    ]
    assert args.arms == ["off"]


@pytest.mark.parametrize(
    "options, named",
    [
        (("--scale", "0"), "--scale 0.0"),
        (("--scale", "2"), "--scale 2.0"),
        (("--arm", "off", "--arm", "off"), "named twice"),
        (("--arm", "keyformer:2.5"), "--arm keyformer:2.5"),
        (("--set", "enforce_eager"), "--set: 'enforce_eager'"),
    ],
)
def test_wrong_options_are_one_line(options, named):
    done = run_script("bench_crossover.py", *options)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and named in done.stderr
    assert len(done.stderr.splitlines()) == 1


class FakeArm:
    """Tokens per step and seconds per step; 100 tokens in all."""

    def __init__(self, name, tokens, seconds, log):
        self.name, self.tokens, self.step_seconds = name, tokens, seconds
        self.done, self.seconds, self.log = 0, 0.0, log

    @property
    def busy(self):
        return self.done < 100

    @property
    def share(self):
        return self.done / 100

    def step(self):
        self.done += self.tokens
        self.seconds += self.step_seconds
        self.log.append(self.name)
        return self.tokens


def test_the_arm_furthest_behind_steps_next():
    log = []
    arms = [FakeArm("a", 10, 1.0, log), FakeArm("b", 5, 2.0, log)]
    assert sum(served_arm.take_turns(arms)) == 200
    assert log == ["a", "b", "b"] * 10, "both end together, b with twice the steps"


def made_up_round(seconds, **changes):
    times = {"0": [1.0, 1.5, 2.5], "1": [2.0, 2.5, seconds]}
    figures = {
        "seconds": seconds,
        "cpu_seconds": seconds / 2 + 1.0,
        "prefill_seconds": 1.0,
        "steps": 6,
        "prefill_steps": 2,
        "token_times": times,
        "running": [1, 2, 2, 2],
        "saturated": [1],
    }
    return served_arm.Round(**figures | changes)


def made_up_arm(name, rounds):
    arm = served_arm.ServedArm.__new__(served_arm.ServedArm)
    arm.name, arm.rounds = name, rounds
    arm.facts = {
        "pool_blocks": 8,
        "pool_mib": 1.0,
        "plugin": True,
        "async_scheduling": False,
    }
    return arm


@pytest.fixture
def made_up_result(tmp_path):
    """Two pools, two arms; figures that can be checked by hand."""
    args = crossover_args(
        *("--requests", "2", "--prompt-len", "64", "--new-tokens", "3"),
        *("--pool", "2", "1", "--output", str(tmp_path / "c.json")),
    )
    points = []
    for point in bench_crossover.list_points(args):
        specs = bench_crossover.list_specs(args, point)
        base = made_up_arm("off", [made_up_round(4.0), made_up_round(6.0)])
        ops = {"score_keys": 0.5}
        fast = made_up_arm(
            "keyformer:0.5",
            [
                made_up_round(2.0 * point.pool, op_seconds=ops, freed_blocks=3),
                made_up_round(2.0 * point.pool, preemptions=1),
            ],
        )
        arms = [
            bench_crossover.describe_arm(
                arm, base, bench_crossover.expect(point, spec, 32), point
            )
            for arm, spec in zip((base, fast), specs, strict=True)
        ]
        fields = {
            name: getattr(point, name)
            for name in ("requests", "prompt_len", "new_tokens", "pool")
        }
        points.append({**fields, "arms": arms})
    result = {
        "benchmark": "crossover",
        "machine": {"cpu": "made up"},
        "settings": common.settings_of(args),
        "points": points,
    }
    bench_crossover.save(args.output, result)
    return args.output


def test_figures_are_those_of_the_rounds(made_up_result):
    ample, tight = common.read_result(made_up_result)["points"]
    off, kept = ample["arms"]
    assert off["tokens_per_s"] == 1.2 and off["output_tokens"] == 12
    assert off["ratio"] == {"total": 1.0, "min": 1.0, "max": 1.0}
    # 10 s against 4 + 4 s; 4 against 4 and 6 against 4 in the rounds.
    assert kept["ratio"] == {"total": 1.25, "min": 1.0, "max": 1.5}
    # Of processor time 7 s against 3 + 3.
    assert kept["cpu_ratio"]["total"] == pytest.approx(7 / 6, rel=0.001)
    assert tight["arms"][1]["ratio"] == {"total": 2.5, "min": 2.0, "max": 3.0}
    assert off["ttft_s"] == {"median": 1.0, "p90": 2.0}
    # Gaps 0.5, 1, 0.5 and 1.5 or 3.5.
    assert off["itl_s"] == {"median": 0.5, "p90": 3.5}
    assert off["running"] == {"peak": 2, "mean": 1.75, "steady": 1.0, "expected": 2}
    assert off["step_seconds"] == {"prefill": 2.0, "decode": 8.0}
    assert off["steps"] == {"prefill": 4, "decode": 8}
    assert (kept["freed_blocks"], kept["preemptions"]) == (3, 1)
    assert kept["share_percent"] == {"score_keys": 6.25}


def test_an_earlier_result_is_shown_and_drawn(made_up_result, tmp_path):
    plot = tmp_path / "c.png"
    done = run_script(
        "bench_crossover.py", "--show", str(made_up_result), "--plot", str(plot)
    )
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(PNG)
    assert last_line(done.stdout) == common.read_result(made_up_result)
    assert "2 requests of 64 + 3 tokens, pool of 1 full sequences" in done.stderr
    rows = [line for line in done.stderr.splitlines() if "| keyformer:0.5 |" in line]
    assert ["1.25" in row for row in rows] == [True, False]
    assert "score_keys %" in done.stderr


def test_results_of_other_benchmarks_are_not_shown(tmp_path):
    (tmp_path / "q.json").write_text('{"benchmark": "quality"}')
    done = run_script("bench_crossover.py", "--show", str(tmp_path / "q.json"))
    assert done.returncode == 2 and "another benchmark" in done.stderr


@pytest.mark.slow
def test_articles_are_joined_and_cut(tiny_model, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"document": "abcd"}\n{"document": "efgh"}\n')
    args = crossover_args(
        *("--articles", str(path), "--model", str(tiny_model("llama-4-2")))
    )
    prompts = bench_crossover.Prompts(args, needed=12)
    point = bench_crossover.Point(requests=3, prompt_len=4, new_tokens=2, pool=1)
    drawn = prompts.draw(point, 320)
    joined = prompts.text
    assert len(joined) == 12, "one token a byte, two newlines behind each article"
    assert drawn == [joined[:4], joined[4:8], joined[8:]]
    with pytest.raises(common.UsageError, match="12 tokens; 13 are needed"):
        bench_crossover.Prompts(args, needed=13)


@pytest.mark.slow
def test_a_tight_pool_is_measured(tiny_model, tmp_path):
    plot = tmp_path / "c.png"
    done = run_script(
        "bench_crossover.py",
        *("--model", str(tiny_model("llama-4-2")), "--dtype", "float32", "--profile"),
        *("--requests", "6", "--prompt-len", "128", "--new-tokens", "64"),
        *("--pool", "2", "--rounds", "2", "--plot", str(plot)),
        *("--arm", "stock", "--arm", "keyformer:0.25:min_tokens=32"),
        *("--set", "max_num_batched_tokens=256"),
    )
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(PNG)
    result = last_line(done.stdout)
    (point,) = result["points"]
    stock, kept = point["arms"]
    assert (stock["plugin"], kept["plugin"]) == (False, True)
    for arm in point["arms"]:
        assert arm["pool_blocks"] == 12
        assert arm["output_tokens"] == 2 * 6 * 64
        seconds = arm["step_seconds"]
        assert sum(seconds.values()) == pytest.approx(arm["seconds"], rel=0.01)
        assert 0 < arm["ttft_s"]["median"] <= arm["ttft_s"]["p90"] < arm["seconds"]
        assert 0 < arm["itl_s"]["median"] <= arm["itl_s"]["p90"]
        assert arm["peak_used_blocks"] <= 12
    ratio = stock["seconds"] / kept["seconds"]
    assert kept["ratio"]["total"] == pytest.approx(ratio, rel=0.01)
    assert stock["evicted_tokens"] == stock["freed_blocks"] == 0
    # 191 tokens are written; the one before the last is there at the last eviction.
    assert kept["freed_blocks"] == 2 * 6 * ((190 - 32) // 32)
    assert kept["evicted_tokens"] == 32 * kept["freed_blocks"]
    assert kept["running"]["peak"] > stock["running"]["peak"]
    assert stock["share_percent"] == {}
    assert kept["share_percent"]["compact_kv"] > 0


@pytest.mark.slow
def test_an_arm_that_cannot_start_says_why(tiny_model):
    done = run_script(
        "bench_crossover.py",
        *("--model", str(tiny_model("llama-4-2")), "--arm", "off"),
        *("--set", "max_model_len=999999"),
    )
    assert done.returncode == 1
    assert "arm off failed" in done.stderr and "max_model_len" in done.stderr


# Serving


def run_serving(*options):
    return subprocess.run(
        [str(BENCHMARKS / "bench_serving.sh"), *options],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


def test_serving_help_names_every_option():
    done = run_serving("--help")
    assert done.returncode == 0 and done.stderr == ""
    text = (BENCHMARKS / "bench_serving.sh").read_text()
    branches = re.findall(r"^  (--[a-z-]+(?: \| --[a-z-]+)*)\)", text, re.M)
    options = {option for branch in branches for option in branch.split(" | ")}
    assert {"--arm", "--pool", "--output", "--plot"} <= options
    shown = set(re.findall(r"^  (--[a-z-]+)", done.stdout, re.M))
    assert shown == options | {"--help"}


@pytest.mark.parametrize(
    "options, named",
    [
        (("--pool", "1"), "--pool 1 is not at least 2"),
        (("--rounds", "none"), "--rounds none is not a number above 0"),
        (("--rounds",), "--rounds: unknown, or its value is missing"),
        (("--colour", "red"), "--colour: unknown"),
        (("--arm", "keyformer:2.5"), "--arm keyformer:2.5"),
        (("--arm", "off", "--arm", "off"), "named twice"),
        (("--output", "/nowhere/at/all.json"), "the folder of /nowhere/at/all.json"),
        (("--model", "/nowhere"), "/nowhere holds no model"),
    ],
)
def test_serving_refuses_before_a_server_starts(options, named):
    done = run_serving(*options)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and named in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_arms_become_flags_of_the_server():
    assert serving.server_flags("off") == serving.server_flags("stock") == []
    arm = "keyformer:0.5:score_mode=fused,min_tokens=64"
    assert serving.server_flags(arm) == [
        *("--kv-policy=keyformer", "--kv-budget=0.5"),
        *("--kv-score-mode=fused", "--kv-min-tokens=64"),
    ]


def test_a_metric_is_summed_and_never_made_up():
    text = '# HELP a b\na{x="1"} 2.0\na{x="2"} 1.0\nab 7\nb_total 3\n'
    assert serving.read_metric(text, "a") == 3
    assert serving.read_metric(text, "b_total") == 3
    with pytest.raises(common.UsageError, match="no metric b"):
        serving.read_metric(text, "b")


def write_runs(folder, **changes):
    """Two rounds of two arms; the second arm is faster by half and by all."""
    for number, base in ((1, 10.0), (2, 20.0)):
        for index, speed in enumerate((base, base * (1 + number / 2))):
            client = {
                "completed": 4,
                "failed": 0,
                "total_input_tokens": 40,
                "total_output_tokens": 80,
                "request_throughput": speed / 20,
                "output_throughput": speed,
                "max_concurrent_requests": 4,
                "median_ttft_ms": 100.0 * number,
                "p90_ttft_ms": 200.0,
                "median_itl_ms": 10.0,
                "p90_itl_ms": 20.0,
            }
            run = {
                "arm": ("off", "keyformer:0.5")[index],
                "client": client | changes,
                "peak_running": number + index,
                "preemptions": 1,
            }
            (folder / f"run-{number}-{index}.json").write_text(json.dumps(run))


def report_args(folder, *options):
    return serving.build_parser().parse_args(
        ["report", str(folder), "2", *options, "--", "off", "keyformer:0.5"]
    )


def test_rounds_of_servers_are_summed_up(tmp_path):
    write_runs(tmp_path)
    args = report_args(tmp_path, "--settings", "requests=4", "max_concurrency=null")
    result = serving.report(args)
    assert result["settings"] == {"requests": 4, "max_concurrency": None}
    off, kept = result["arms"]
    assert off["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    # 15 and 40 against 10 and 20.
    assert kept["tokens_per_s"] == {"median": 27.5, "min": 15.0, "max": 40.0}
    assert kept["ratio"] == {"median": 27.5 / 15, "min": 1.5, "max": 2.0}
    assert kept["ttft_ms"] == {"median": 150.0, "p90": 200.0}
    assert (off["peak_running"], kept["peak_running"]) == (2, 3)
    assert kept["preemptions"] == 2 and kept["completed"] == 8
    serving.draw(result, tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(PNG)


def test_failed_requests_are_no_result(tmp_path):
    write_runs(tmp_path, failed=1)
    with pytest.raises(common.UsageError, match="off: 2 requests failed"):
        serving.report(report_args(tmp_path))


@pytest.mark.slow
def test_servers_are_measured_and_stopped(tiny_model, tmp_path):
    done = run_serving(
        *("--model", str(tiny_model("llama-4-2")), "--dtype", "float32"),
        # Long enough for the metrics to be read while requests run.
        *("--rounds", "1", "--requests", "8", "--prompt-len", "128"),
        *("--new-tokens", "384", "--pool", "2", "--logs", str(tmp_path)),
        *("--arm", "stock", "--arm", "keyformer:0.25:min_tokens=32"),
        *("--output", str(tmp_path / "s.json")),
    )
    assert done.returncode == 0, done.stderr
    result = last_line(done.stdout)
    assert result == common.read_result(tmp_path / "s.json")
    assert result["settings"]["num_blocks"] == 2 * 16 + 1
    stock, kept = result["arms"]
    for arm in (stock, kept):
        assert (arm["completed"], arm["output_tokens"]) == (8, 8 * 384)
        assert 1 <= arm["peak_running"] <= 8
    assert "KV policy keyformer" in (tmp_path / "server-1-1.log").read_text()
    assert "KV policy" not in (tmp_path / "server-1-0.log").read_text()
    for log in tmp_path.glob("server-*.log"):
        assert "Application shutdown complete" in log.read_text()


def processes_about(text):
    """Ids of the processes with this in their command line; zombies have none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (entry / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_script_leaves_no_server(tiny_model, tmp_path, number):
    # A name that no other process has in its command line.
    model = tmp_path / "model"
    model.symlink_to(tiny_model("llama-4-2"))
    with open(tmp_path / "stderr", "wb") as stderr:
        script = subprocess.Popen(
            [str(BENCHMARKS / "bench_serving.sh"), "--model", str(model)],
            env={**os.environ, "PYTHON": sys.executable},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            # As from a terminal: in the background SIGINT would be ignored for good.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def servers():
        return processes_about(f"serve\0{model}")

    try:
        deadline = time.monotonic() + 120
        while not servers():
            assert script.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        script.send_signal(number)
        assert script.wait(90) == 128 + number
    finally:
        script.kill()
    assert servers() == []
    assert b"round 1 of 2: off" in (tmp_path / "stderr").read_bytes()
