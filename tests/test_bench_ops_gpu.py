# SPDX-License-Identifier: Apache-2.0
"""What bench_ops times on a GPU, over the CUDA kernels on a CPU; timed is nothing."""

from __future__ import annotations

import bars
import bench_ops
import common
import op_cases
import pytest
import torch

from keyformer_vllm import ops
from keyformer_vllm.ops.layout import key_view, value_view, write_tokens
from tests import emulated_cuda
from tests.bench_scripts import run_script

SHAPE = op_cases.Shape(4, 2, 64, 2)


class EmulatedTarget(op_cases.GpuTarget):
    """The stand-ins of vLLM's operators are plain PyTorch; the layout is a GPU's."""

    def writer(self, batch, key, value, slots):
        def run():
            for layer in batch.kv_cache:
                for head in range(batch.shape.num_kv_heads):
                    for view, rows in ((key_view, key), (value_view, value)):
                        write_tokens(
                            view(layer, batch.layout), slots, head, rows[:, head]
                        )

        return run

    def attention(self, rows):
        batch = rows.batch

        def run():
            for layer in range(batch.shape.num_layers):
                # What FlashAttention gets: tokens before heads, rows that are whole.
                key, value = batch.rows(layer)
                assert key.stride(-1) == value.stride(-1) == 1
                for request, blocks in enumerate(batch.block_table.long()):
                    own = slice(request * rows.num_rows, (request + 1) * rows.num_rows)
                    q, k, v = (
                        t.transpose(0, 1).float()
                        for t in (
                            rows.query[own],
                            key[blocks].flatten(0, 1)[: batch.kv_len],
                            value[blocks].flatten(0, 1)[: batch.kv_len],
                        )
                    )
                    seen = torch.ones(rows.num_rows, batch.kv_len, dtype=torch.bool)
                    found = torch.nn.functional.scaled_dot_product_attention(
                        *(q, k, v),
                        attn_mask=seen.tril(batch.kv_len - rows.num_rows),
                        enable_gqa=True,
                    )
                    rows.output[own] = found.transpose(0, 1).to(rows.output.dtype)

        return run


@pytest.fixture
def batch(monkeypatch):
    monkeypatch.setitem(ops._loaded, "emulated", emulated_cuda)
    target = EmulatedTarget("emulated", "cpu")
    return op_cases.make_batch(SHAPE, 2, 70, 16, torch.bfloat16, target)


@pytest.mark.parametrize(
    "make_cases, operators",
    [
        (
            op_cases.decode_cases,
            {"score_keys", "paged_attention_scored", "reset_slots"},
        ),
        (op_cases.prefill_cases, {"score_keys", "reset_slots"}),
        (
            lambda batch: op_cases.eviction_cases(batch, 16, "one block each"),
            {"select_keep", "compact_kv"},
        ),
    ],
    ids=["decode", "prefill", "eviction"],
)
def test_every_call_is_one_that_the_kernels_take(batch, make_cases, operators):
    cases = {case.name: case for case in make_cases(batch)}
    copy = lambda: None, 1  # noqa: E731
    rows = bench_ops.time_group("", list(cases.values()), 1, copy)
    assert [row["name"] for row in rows] == list(cases)
    assert operators <= {name.split(",")[0] for name in cases}


def test_the_same_cache_gives_the_same_attention(batch):
    """So what is compared reads the same tokens; catches a K taken for a V."""
    rows = op_cases.Rows(batch, 1)
    rows.attend()()
    expected = rows.output.clone()
    assert expected.abs().max() > 0.1
    rows.output.zero_()
    rows.attend_scored(op_cases.tau_of(1, batch.num_reqs, slice(None)))()
    torch.testing.assert_close(rows.output, expected, atol=0.02, rtol=0.02)


def test_triton_is_not_asked_for_what_it_lacks(batch):
    batch.target.impl = "triton"
    names = [case.name for case in op_cases.decode_cases(batch)]
    assert "score_keys, 1 row" in names
    assert not any(name.startswith("paged_attention_scored") for name in names)


def ops_args(*options):
    args = bench_ops.build_parser().parse_args(options)
    bench_ops.apply_device(args)
    return args


def test_sizes_are_those_of_the_device():
    here, there = ops_args(), ops_args("--device", "cuda", "--requests", "3")
    assert (here.shape, here.block_size, here.requests) == ("smollm2", 32, 8)
    assert (there.shape, there.block_size, there.requests) == ("8b", 16, 3)
    assert there.kv_len == 4096 and "check" in here.groups
    assert "check" not in there.groups


def test_what_no_gpu_can_do_is_one_line():
    done = run_script("bench_ops.py", "--device", "cuda", "--groups", "check")
    assert done.returncode == 2 and "--groups check" in done.stderr
    if not torch.cuda.is_available():
        done = run_script("bench_ops.py", "--device", "cuda")
        assert done.returncode == 2 and "needs a GPU" in done.stderr


def test_the_bars_are_of_the_size_that_is_measured_by_default():
    args = ops_args("--device", "cuda")
    row = {
        "name": "paged_attention_scored",
        "requests": args.requests,
        "kv_len": args.kv_len,
        "share_of_copy": 0.85,
        "ratio": {"median": 1.2},
    }
    assert [bar["verdict"] for bar in bars.judge_ops([row])] == ["met", "MISSED"]
    row["kv_len"] = 17
    verdicts = {bar["verdict"] for bar in bars.judge_ops([row])}
    assert verdicts == {"not measured"}


def test_a_timer_is_asked_for_every_call():
    times = iter([3.0, 4.0, 5.0, 6.0])
    functions = {"a": lambda: None, "b": lambda: None}
    seconds = common.measure_interleaved(functions, 2, "", lambda _: next(times))
    assert seconds == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
