# SPDX-License-Identifier: Apache-2.0
"""Our views and moves against the engine's own cache writes and attention."""

import pytest
import torch

from keyformer_vllm import ops
from keyformer_vllm.ops import layout as layouts
from tests.helpers import MATHS, BatchSpec, make_batch

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = pytest.mark.slow

CASES = [
    pytest.param(
        *case, id="-".join(map(str, case)), marks=[pytest.mark.amx] * ("amx" in case)
    )
    for case in [
        (fp32, "vec", 64, 32),
        (fp32, "vec16", 80, 128),
        (fp32, "vec", 128, 128),
        (bf16, "vec", 64, 32),
        (bf16, "vec", 256, 32),
        (bf16, "vec16", 80, 32),
        (bf16, "vec16", 112, 128),
        (bf16, "vec", 128, 64),
        (bf16, "amx", 64, 32),
        (bf16, "amx", 96, 64),
        (bf16, "amx", 128, 128),
        (fp16, "vec", 64, 32),
        (fp16, "vec16", 80, 64),
    ]
]


@pytest.fixture(scope="module")
def engine():
    """vLLM's CPU operators."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm import _custom_ops

    if torch.cpu._is_amx_tile_supported():
        # Outside a worker nobody has asked the kernel for the tile registers yet.
        torch.cpu._init_amx()
    return _custom_ops


def split(kv_cache):
    num_blocks, heads, block_size, width = kv_cache.shape
    pages = kv_cache.view((num_blocks, heads, 2 * block_size, width // 2))
    return pages.chunk(2, dim=2)


def writer(engine, layout):
    def write(key, value, kv_cache, slots):
        engine.cpu_attn_reshape_and_cache(key, value, *split(kv_cache), slots, layout)

    return write


def attend(
    engine,
    batch,
    query,
    output,
    soft_cap=0.0,
    optional=None,
    block_table=None,
    kv_lens=None,
):
    """The engine's own attention over the batch, or another table and lengths."""
    spec = batch.spec
    optional = optional or {}
    kv_lens = batch.kv_lens if kv_lens is None else kv_lens
    metadata = engine.cpu_attn_get_scheduler_metadata(
        num_reqs=len(kv_lens),
        num_heads=spec.num_query_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        seq_lens=kv_lens,
        dtype=spec.dtype,
        query_start_loc=batch.query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa=spec.layout,
        enable_kv_split=False,
    )
    key_cache, value_cache = split(batch.kv_cache[0])
    engine.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=batch.query_start_loc,
        seq_lens=kv_lens,
        scale=spec.head_size**-0.5,
        causal=True,
        alibi_slopes=optional.get("alibi_slopes"),
        sliding_window=-1,
        block_table=batch.block_table if block_table is None else block_table,
        softcap=soft_cap,
        scheduler_metadata=metadata,
        s_aux=optional.get("sinks"),
    )


@pytest.mark.parametrize(("dtype", "layout", "head_size", "block_size"), CASES)
def test_the_engine_packs_as_we_read(engine, dtype, layout, head_size, block_size):
    layouts.probe_layout(
        writer(engine, layout),
        num_kv_heads=3,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        layout=layout,
    )


@pytest.mark.parametrize(("dtype", "layout", "head_size", "block_size"), CASES)
def test_attention_after_compaction_sees_the_survivors(
    engine, dtype, layout, head_size, block_size
):
    """Write with the engine, compact, attend with the engine, compare with SDPA."""
    heads, group = 2, 2
    spec = BatchSpec(
        dtype,
        layout,
        heads * group,
        heads,
        head_size,
        block_size,
        ((3 * block_size + 17, 1), (2 * block_size, 1)),
    )
    batch = make_batch(spec)
    kv_cache = batch.kv_cache[0]
    kv_cache.zero_()
    write = writer(engine, layout)
    for request in range(2):
        write(
            batch.keys[request][0],
            batch.values[request][0],
            kv_cache,
            batch.slots(request),
        )
    num_evict = torch.tensor([2 * block_size, block_size], dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    for request, (kv_len, _) in enumerate(spec.lens):
        shape = (1, heads, kv_len)
        batch.set_side(batch.score, request, torch.rand(shape, generator=generator))
        positions = torch.arange(kv_len).expand(shape)
        batch.set_side(batch.position, request, positions)
    keep = ops.select_keep(
        batch.score,
        batch.position,
        batch.block_table,
        batch.kv_lens,
        num_evict,
        torch.tensor([4, 4], dtype=torch.int32),
        batch.kv_lens - 8,
        torch.tensor([1, 1], dtype=torch.int32),
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.int64),
        max_kv_len=3 * block_size + 17,
        impl="cpu",
    )
    ops.compact_kv(
        batch.kv_cache,
        batch.score,
        batch.position,
        batch.block_table,
        batch.kv_lens,
        num_evict,
        keep,
        layout=layout,
        impl="cpu",
    )
    # The engine reads the shifted table and the shorter length.
    freed = (num_evict // block_size).tolist()
    table = torch.stack(
        [row.roll(-n) for row, n in zip(batch.block_table, freed, strict=True)]
    )
    seq_lens = batch.kv_lens - num_evict
    query = batch.query.contiguous()
    output = torch.empty_like(query)
    scale = head_size**-0.5
    attend(engine, batch, query, output, block_table=table, kv_lens=seq_lens)
    for request, (kv_len, _) in enumerate(spec.lens):
        for query_head in range(heads * group):
            head = query_head // group
            kept = keep[0, request, head, :kv_len]
            key = batch.keys[request][0, kept, head].double()
            value = batch.values[request][0, kept, head].double()
            logits = scale * key @ query[request, query_head].double()
            want = torch.softmax(logits, 0) @ value
            error = float((output[request, query_head] - want).abs().max())
            # The engine rounds weights and output to the cache's dtype.
            assert error < (1e-5 if dtype == fp32 else 2e-2), (request, query_head)


@pytest.mark.parametrize(
    "math", ["plain", "tau-cap", "alibi", "noise-tau-cap-alibi-sinks"]
)
@pytest.mark.parametrize(("dtype", "layout", "head_size", "block_size"), CASES)
def test_our_attention_is_the_engines_where_nothing_was_evicted(
    engine, dtype, layout, head_size, block_size, math
):
    """Soft cap, then bias; the bias counts from the query; a sink is a logit."""
    lens = ((1, 1), (block_size + 1, 1), (600, 3))
    spec = BatchSpec(dtype, layout, 6, 2, head_size, block_size, lens)
    batch = make_batch(spec)
    kv_cache = batch.kv_cache[0]
    kv_cache.zero_()
    write = writer(engine, layout)
    for request, (kv_len, _) in enumerate(lens):
        key, value = batch.keys[request][0], batch.values[request][0]
        write(key, value, kv_cache, batch.slots(request))
        positions = torch.arange(kv_len).expand(1, 2, kv_len)
        batch.set_side(batch.position, request, positions)
    query = batch.query.contiguous()
    theirs, ours = torch.empty_like(query), torch.empty_like(query)
    case = MATHS[math]
    optional = case.optional(batch)
    attend(engine, batch, query, theirs, case.soft_cap, optional)
    ops.paged_attention_scored(
        ours,
        query,
        kv_cache,
        batch.score[0],
        batch.position[0],
        batch.block_table,
        batch.kv_lens,
        batch.query_start_loc,
        torch.cat([torch.arange(kv_len - rows, kv_len) for kv_len, rows in lens]),
        torch.full((len(query),), case.tau),
        torch.full((len(lens),), case.noise_key),
        **optional,
        layer_index=0,
        first_query_head=0,
        scale=head_size**-0.5,
        soft_cap=case.soft_cap,
        layout=layout,
        impl="cpu",
    )
    # The engine rounds weights and output to the cache's dtype.
    tolerance = 1e-5 if dtype == fp32 else 2e-2
    assert float((ours - theirs).abs().max()) < tolerance
