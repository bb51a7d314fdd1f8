# SPDX-License-Identifier: Apache-2.0
"""Nothing falls back silently, and torch.compile sees the operators as opaque."""

import subprocess
import sys

import pytest
import torch

from keyformer_vllm import ops
from keyformer_vllm.ops import cpu
from tests.helpers import BatchSpec, PagedBatch, make_batch


def select_arguments(batch: PagedBatch) -> tuple:
    count = len(batch.kv_lens)
    ints = torch.ones(count, dtype=torch.int32)
    return (
        batch.score,
        batch.position,
        batch.block_table,
        batch.kv_lens,
        ints * 8,
        ints,
        ints * 10**6,
        ints,
        torch.zeros(count, dtype=torch.bool),
        torch.zeros(count, dtype=torch.int64),
    )


@pytest.mark.parametrize("impl", ["gpu", "", "CPU"])
def test_an_unknown_implementation_is_refused(impl):
    with pytest.raises(RuntimeError, match="impl must be one of reference, cpu"):
        ops.require_impl(impl)
    batch = make_batch(BatchSpec())
    with pytest.raises(RuntimeError, match="impl must be one of reference, cpu"):
        ops.select_keep(*select_arguments(batch), max_kv_len=113, impl=impl)


@pytest.mark.parametrize(("impl", "module"), [("cpu", "_C"), ("cuda", "_C_cuda")])
def test_a_missing_extension_says_what_to_build(impl, module):
    """In a process where `module` cannot be imported only "reference" works."""
    code = (
        f"import sys; sys.modules['keyformer_vllm.{module}'] = None\n"
        "from keyformer_vllm import ops\n"
        "ops.require_impl('reference')\n"
        f"try:\n    ops.require_impl('{impl}')\n"
        "except RuntimeError as error:\n"
        "    assert 'setup.py build_ext --inplace' in str(error), error\n"
        "else:\n    sys.exit('fell back')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_instruction_set_can_be_forced():
    assert cpu.has_isa("baseline")
    best = cpu.active_isa()
    cpu.set_isa("baseline")
    assert cpu.active_isa() == "baseline"
    cpu.set_isa("auto")
    assert cpu.active_isa() == best
    for isa in cpu.ISAS:
        if not cpu.has_isa(isa):
            with pytest.raises(RuntimeError, match=f"lacks {isa}"):
                cpu.set_isa(isa)


def plain(batch: PagedBatch) -> PagedBatch:
    """Own storage for K/V, scores and positions: opcheck copies its arguments."""
    batch.kv_cache = batch.kv_cache.contiguous()
    batch.score = torch.rand(batch.score.shape)
    batch.position = batch.position.contiguous()
    batch.place = batch.place.contiguous()
    return batch


def test_fake_implementations_agree_with_the_kernels():
    batch = plain(make_batch(BatchSpec(lens=((113, 4), (50, 1)))))
    tests = ("test_schema", "test_faketensor")
    keyformer = torch.ops.keyformer
    selection = (*select_arguments(batch), 120, 0, 0)
    torch.library.opcheck(keyformer.select_keep.default, selection, test_utils=tests)
    keep = keyformer.select_keep(*selection)
    moves = (
        batch.kv_cache,
        batch.score,
        batch.position,
        batch.block_table,
        batch.kv_lens,
        torch.full((2,), 8, dtype=torch.int32),
        keep,
        0,
    )
    for op in (keyformer.compact_kv, keyformer.exchange_kv):
        torch.library.opcheck(op.default, moves, test_utils=tests)
    torch.library.opcheck(
        keyformer.reset_slots.default,
        (batch.score, batch.position, batch.slots(0), torch.arange(113)),
        test_utils=tests,
    )
    torch.library.opcheck(
        keyformer.renumber_slots.default,
        (batch.place, batch.position, batch.block_table, batch.kv_lens),
        test_utils=tests,
    )
    scoring = (
        batch.query,
        batch.kv_cache[0],
        batch.score[0],
        batch.position[0],
        batch.block_table,
        batch.kv_lens,
        batch.query_start_loc,
        batch.query_positions,
        torch.ones(5),
        torch.tensor([0, 7]),
        torch.full((batch.spec.num_query_heads,), 0.5),
        batch.place[0],
        None,
        0,
        0,
        0.125,
        0.0,
        0,
    )
    torch.library.opcheck(keyformer.score_keys.default, scoring, test_utils=tests)
    torch.library.opcheck(
        keyformer.paged_attention_scored.default,
        (torch.empty(batch.query.shape), *scoring),
        test_utils=tests,
    )
    audit = torch.empty(*batch.query.shape[:2], 3)
    fronts = torch.tensor([1, 0], dtype=torch.int32)
    auditing = (*scoring[:10], fronts, scoring[10], *scoring[12:])
    torch.library.opcheck(
        keyformer.paged_attention_audited.default,
        (torch.empty(batch.query.shape), audit, *auditing),
        test_utils=tests,
    )


def test_operators_run_inside_a_compiled_graph():
    # One storage seen as several dtypes, as the pages are, cannot be traced; inside
    # the engine the operators run below its own opaque attention operator.
    batch = plain(make_batch(BatchSpec()))

    def step(slots, positions):
        ops.reset_slots(batch.score, batch.position, slots, positions, impl="cpu")
        return positions + 1

    ops.require_impl("cpu")  # a module cannot be loaded while a graph is traced
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    positions = torch.arange(113)
    assert torch.equal(compiled(batch.slots(0), positions), positions + 1)
    assert torch.equal(batch.side(batch.position, 0)[0, 0].long(), positions)
