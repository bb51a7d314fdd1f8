# SPDX-License-Identifier: Apache-2.0
"""The benchmarks start, count and draw right. What they measure is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bench_admission
import bench_ops
import common
import pytest

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


# Admission


def test_pool_holds_the_full_sequences_and_the_null_block():
    args = bench_admission.build_parser().parse_args([])
    assert bench_admission.count_pool_blocks(args) == 4 * 40 + 1
