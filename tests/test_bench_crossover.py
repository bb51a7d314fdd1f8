# SPDX-License-Identifier: Apache-2.0
"""bench_crossover and its arms: pools, turns, figures, plots; one small run."""

from __future__ import annotations

from types import SimpleNamespace

import bars
import bench_crossover
import common
import op_clock
import pytest
import served_arm

from tests.bench_scripts import PNG, last_line, run_script


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
        *("off", "ample", "tight", "prefill-bound", "admission", "crossover"),
        *("gpu-ample", "gpu-tight", "gpu-prefill-bound"),
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
    turns = [log[i : i + 3] for i in range(0, 30, 3)]
    assert all(sorted(turn) == ["a", "b", "b"] for turn in turns), (
        "both end together, b with twice the steps"
    )
    assert {turn[0] for turn in turns} == {"a", "b"}, "none is always the first"


def test_one_arm_after_the_other():
    log = []
    arms = [FakeArm("a", 50, 1.0, log), FakeArm("b", 25, 2.0, log)]
    assert sum(served_arm.one_by_one(arms)) == 200
    assert log == list("aabbbb")


@pytest.mark.parametrize(
    "preset, workload, num_blocks, max_num_seqs",
    [
        ("gpu-ample", (64, 2048, 128), 64 * 136 + 1, 64),
        ("gpu-tight", (192, 2048, 1024), 150_000 // 16 + 1, 256),
        ("gpu-prefill-bound", (64, 4096, 256), 150_000 // 16 + 1, 64),
    ],
)
def test_presets_for_a_gpu(preset, workload, num_blocks, max_num_seqs):
    args = crossover_args("--preset", preset)
    (point,) = bench_crossover.list_points(args)
    assert (point.requests, point.prompt_len, point.new_tokens) == workload
    specs = bench_crossover.list_specs(args, point)
    assert specs[0].name == "stock" and args.turns == "off" and args.profile
    for spec in specs:
        assert spec.num_blocks == num_blocks
        assert spec.engine["max_num_seqs"] == max_num_seqs
        assert spec.engine["load_format"] == "dummy" and spec.profile
        assert "enforce_eager" not in spec.engine
    # A pool given in sequences wins over one in tokens.
    args = crossover_args("--preset", preset, "--pool", "2")
    (point,) = bench_crossover.list_points(args)
    assert point.pool_tokens is None and point.pool == 2


def test_a_preset_for_a_gpu_is_refused_without_one():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = run_script("bench_crossover.py", "--preset", "gpu-tight")
    assert done.returncode == 2 and "needs a GPU" in done.stderr


def judged_arm(name, tokens_per_s, peak, decode, **op_seconds):
    return {
        "name": name,
        "tokens_per_s": tokens_per_s,
        "running": {"peak": peak},
        "step_seconds": {"prefill": 10.0, "decode": decode},
        "steps": {"prefill": 10, "decode": 100},
        "op_seconds": {"prefill": op_seconds, "decode": op_seconds},
    }


def test_bars_are_met_or_missed_or_not_measured():
    stock = judged_arm("stock", 100.0, 40, 10.0)
    whole = judged_arm("keyformer:1.0", 98.0, 40, 10.0)
    half = judged_arm("keyformer:0.5", 170.0, 99, 8.5, select_keep=0.2, score_keys=3.0)
    ample = bars.judge_arms("gpu-ample", [stock, whole, half])
    assert [(row["measured"], row["verdict"]) for row in ample] == [
        (pytest.approx(0.98), "MISSED"),
        (pytest.approx(0.85), "met"),
        (pytest.approx(0.2 / 8.5), "met"),
    ]
    tight = bars.judge_arms("gpu-tight", [stock, half])
    assert [row["verdict"] for row in tight] == [
        *("met", "MISSED", "not measured", "not measured")
    ]
    (prompts,) = bars.judge_arms("gpu-prefill-bound", [stock, half])
    assert prompts["measured"] == pytest.approx(0.3)
    assert prompts["verdict"] == "MISSED"
    assert bars.judge_arms("tight", [stock, half]) == []
    table = bars.format_bars(ample)
    assert "| >= 0.99 |" in table and "| <= 0.85 |" in table and "MISSED" in table


PRESET_BARS = [bar for bar in bars.BARS if bar.source != "bench_ops"]


@pytest.mark.parametrize("bar", PRESET_BARS, ids=str)
def test_bars_name_what_is_measured(bar):
    assert bar.figure in bars.FIGURES
    assert bar.subject in bench_crossover.PRESETS[bar.source].arms


class FakeEvent:
    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing
        self.waited_for = False

    def record(self):
        FakeEvent.now += 5.0
        self.time = FakeEvent.now

    def synchronize(self):
        self.waited_for = True

    def elapsed_time(self, end):
        assert end.waited_for
        return end.time - self.time


@pytest.mark.parametrize("capturing", [False, True])
def test_ops_on_a_gpu_are_timed_by_events(monkeypatch, capturing):
    import torch

    from keyformer_vllm import ops

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(ops, "select_keep", lambda *_, impl: impl)
    original = ops.select_keep
    phases = iter(["prefill", "decode", "decode"])
    clock = op_clock.OpClock(lambda: next(phases))
    tensor = SimpleNamespace(is_cuda=True)
    with clock.watching():
        assert [ops.select_keep(tensor, impl="cuda") for _ in range(3)] == ["cuda"] * 3
    assert ops.select_keep is original
    # 5 ms lie between the events of a call.
    expected = {"prefill": {"select_keep": 0.005}, "decode": {"select_keep": 0.01}}
    for _ in range(2):  # asking again adds nothing
        assert clock.seconds() == ({} if capturing else expected)


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
        ops = {"prefill": {"score_keys": 0.25}, "decode": {"score_keys": 0.25}}
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
    assert kept["op_seconds"]["decode"] == {"score_keys": 0.25}


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
