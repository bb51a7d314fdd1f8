# SPDX-License-Identifier: Apache-2.0
"""The benchmarks start, count and draw right. What they measure is not tested."""

from __future__ import annotations

import statistics
import subprocess
import sys

import bench_ops
import bench_quality
import common
import engines
import predict_gpu
import predict_serving
import pytest

from tests.bench_scripts import BENCHMARKS, PNG, last_line, run_script

SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("bench_*.py"))


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


# Predictions


def test_predicted_bytes_and_times_by_hand():
    """One KV head of 4 dimensions, two query heads, a range of 256 keys."""
    model = predict_gpu.Model(1, 2, 1, 4, 2, 16)
    assert predict_gpu.kv_bytes(model, 256) == 256 * 2 * 4 * 2
    # K and V; position and score; logits there and back; a range's output and state.
    expected = 4096 + 256 * 12 + 2 * 256 * 2 * 4 + 2 * 2 * (16 + 16)
    assert predict_gpu.attention_bytes(model, 256) == expected
    # 1,024 weights of each of two query heads are two tiles, and 2,048 in scratch.
    weigh, add = predict_gpu.score_work(model, 100, 1024)
    assert weigh == (100 + 2048 * 2.125, 2 * predict_gpu.WEIGH_TILE)
    assert add == (2048 * 2.25, 2 * predict_gpu.ADD_TILE)
    gpu = predict_gpu.Gpu(100.0, 2, 10.0, 4, 0.5)
    assert (gpu.bytes_time(200), gpu.issue_time(80)) == (2.0, 2.0)
    slow_bytes = predict_gpu.predict(gpu, "", [predict_gpu.Work(300, 80)], "", 6.0)
    assert (slow_bytes.seconds, slow_bytes.share) == (3.0, 0.5)
    both = [predict_gpu.Work(100, 80), predict_gpu.Work(300, 80)]
    assert predict_gpu.predict(gpu, "", both, "", 1.0).seconds == 2.0 + 3.0


def tiny_load(prompt: int, pool: int) -> predict_serving.Load:
    return predict_serving.Load("", 2, prompt, 3, pool)


def test_predicted_serving_by_hand():
    """Two requests of 4 + 3 tokens in blocks of 4; seconds of each step are listed."""
    times = predict_serving.Times(fixed=1.0, prompt_token=0.5, resident_token=0.1)
    stock = predict_serving.Arm("stock", 1.0)
    ample = predict_serving.serve(tiny_load(4, 16), stock, times, 4)
    steps = [8 * 0.5, 1 + 10 * 0.1, 1 + 12 * 0.1]
    assert ample == pytest.approx((sum(steps), (steps[1] + steps[2]) / 2, 2, 2, 0))
    # In three blocks the second request is preempted by its first new block, waits for
    # the first one's end and computes its prompt and its one token again.
    tight = predict_serving.serve(tiny_load(4, 12), stock, times, 4)
    steps = [8 * 0.5, 1 + 5 * 0.1, 1 + 6 * 0.1, 5 * 0.5, 1 + 6 * 0.1]
    decode = (steps[1] + steps[2] + steps[4]) / 3
    mean = (2 * steps[0] + sum(steps[1:])) / sum(steps)
    assert tight == pytest.approx((sum(steps), decode, 2, mean, 1))


def test_predicted_eviction_gives_blocks_back():
    """A prompt of two blocks of 4 shrinks to one, and whole blocks go after that."""
    half = predict_serving.Arm("0.5", 0.5)
    server = predict_serving.Server(tiny_load(8, 24), half, 4)
    held = []
    while server.running or server.waiting:
        server.schedule()
        held.append([request.held for request in server.running])
    assert held == [[4, 4], [5, 5], []]
    assert (server.free, server.peak_running, server.preempted) == (6, 2, 0)
    first = predict_serving.Request(8)
    first.held, server.free = 7, 4
    assert server.grow(first, 1) and server.free == 4
    server.evict(first)
    assert (first.held, server.free) == (4, 5)


def test_predicted_steps_know_their_costs():
    gpu, model = predict_gpu.Gpu(), predict_gpu.Model()
    load = predict_serving.LOADS[0]
    stock, half = (
        predict_serving.step_times(gpu, model, load, arm, 0.01)
        for arm in predict_serving.ARMS[:2]
    )
    # By definition of the step; scores cost a part of a prompt and of reading.
    assert stock.fixed + 64 * 2048 * stock.resident_token == pytest.approx(0.01)
    assert half.fixed == stock.fixed
    assert 1.0 < half.prompt_token / stock.prompt_token < 1.2
    assert 1.0 < half.resident_token / stock.resident_token < 1.2


def test_readme_shows_what_serving_is_predicted():
    done = run_script("predict_serving.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() in (BENCHMARKS / "README.md").read_text()
    assert len(last_line(done.stdout)["predicted"]) == 9


def test_readme_shows_what_is_predicted():
    done = run_script("predict_gpu.py")
    assert done.returncode == 0, done.stderr
    text = (BENCHMARKS / "README.md").read_text()
    assert done.stderr.strip() in text
    rows = last_line(done.stdout)["predicted"]
    assert all(row["seconds"] > 0 and row["share"] > 0 for row in rows)
    bandwidth = 100 / rows[0]["share"]
    assert f"{bandwidth:.0f} % of the bandwidth of a copy" in text
