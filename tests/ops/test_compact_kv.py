# SPDX-License-Identifier: Apache-2.0
"""compact_kv and exchange_kv against gather-then-write on the raw bytes."""

import numpy as np
import pytest
import torch

from keyformer_vllm import ops
from keyformer_vllm.ops.layout import page_bytes, side_views
from tests.helpers import (
    ROW_IMPLS,
    BatchSpec,
    PagedBatch,
    head_offset,
    key_offsets,
    make_batch,
    suited,
    value_offsets,
)

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}

# 5 requests, one of which evicts nothing and one of which evicts no whole block.
LENS = ((113, 0), (64, 0), (255, 0), (33, 0), (300, 0))
SPECS = [
    BatchSpec(dtype, layout, heads, heads, head_size, block_size, LENS, num_layers=2)
    for dtype, layout, heads, head_size, block_size in [
        (fp32, "vec", 2, 64, 32),
        (fp32, "vec16", 3, 80, 64),
        (fp32, "vec", 1, 256, 128),
        (bf16, "vec", 3, 64, 32),
        (bf16, "vec16", 2, 112, 128),
        (bf16, "amx", 2, 64, 32),
        (bf16, "amx", 3, 96, 64),
        (bf16, "amx", 1, 128, 128),
        (fp16, "vec", 2, 32, 64),
        (fp16, "vec16", 1, 80, 32),
        (bf16, "nhd", 3, 128, 16),
        (fp16, "hnd", 2, 96, 16),
    ]
]


def eviction_of(spec: BatchSpec) -> torch.Tensor:
    bs = spec.block_size
    return torch.tensor(
        [min(bs, 96), 0, 255 // bs * bs, 1, max(bs, 160 // bs * bs)],
        dtype=torch.int32,
    )


def random_keep(
    batch: PagedBatch, num_evict: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    spec = batch.spec
    shape = (spec.num_layers, len(spec.lens), spec.num_kv_heads, 320)
    keep = torch.zeros(shape, dtype=torch.bool)
    for layer in range(spec.num_layers):
        for request, (kv_len, _) in enumerate(spec.lens):
            for head in range(spec.num_kv_heads):
                order = torch.randperm(kv_len, generator=generator)
                kept = order[: kv_len - int(num_evict[request])]
                keep[layer, request, head, kept] = True
    return keep


def fill_side(batch: PagedBatch, generator: torch.Generator) -> None:
    """Distinct scores and positions everywhere, also where no token is."""
    batch.score.copy_(torch.randn(batch.score.shape, generator=generator))
    numbers = torch.randperm(batch.position.numel(), generator=generator).int()
    batch.position.copy_(numbers.view(batch.position.shape))


def compacted(
    batch: PagedBatch,
    keep: torch.Tensor,
    num_evict: torch.Tensor,
    exchange: bool = False,
) -> torch.Tensor:
    """The whole storage after gather-then-write, by element offsets.

    With `exchange` it also goes the other way.
    """

    def move(data: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        others = data[target]
        data[target] = data[source]
        if exchange:
            data[source] = others

    spec = batch.spec
    bs, size = spec.block_size, spec.head_size
    key_at = key_offsets(spec.layout, bs, size, spec.num_kv_heads)
    value_at = value_offsets(spec.layout, bs, size, spec.num_kv_heads)
    both = torch.cat((key_at, value_at), 1)  # [block_size, 2 * head_size]
    raw = batch.raw.clone()
    page = page_bytes(spec.num_kv_heads, bs, size, spec.dtype.itemsize)
    num_blocks = batch.kv_cache.shape[1]
    elements = raw.view(INT_OF_SIZE[spec.dtype.itemsize])
    words = raw.view(torch.int32)
    side_start = spec.num_kv_heads * bs * 2 * size * spec.dtype.itemsize
    for request, (kv_len, _) in enumerate(spec.lens):
        front = int(num_evict[request])
        slots = batch.slots(request)
        for layer in range(spec.num_layers):
            for head in range(spec.num_kv_heads):
                kept = keep[layer, request, head, :kv_len]
                source = slots[:front][kept[:front]]
                target = slots[front:][~kept[front:]]
                pages = [
                    (layer * num_blocks + s // bs) * page for s in (source, target)
                ]
                at = [
                    (p // spec.dtype.itemsize + head_offset(spec, head))[:, None]
                    + both[s % bs]
                    for p, s in zip(pages, (source, target), strict=True)
                ]
                move(elements, *at)
                for number in range(2):  # scores, then positions
                    block = (number * spec.num_kv_heads + head) * bs
                    at = [
                        (p + side_start) // 4 + block + s % bs
                        for p, s in zip(pages, (source, target), strict=True)
                    ]
                    move(words, *at)
    return raw


def compact(
    batch: PagedBatch,
    keep: torch.Tensor,
    num_evict: torch.Tensor,
    impl: str,
    exchange: bool = False,
) -> None:
    (ops.exchange_kv if exchange else ops.compact_kv)(
        batch.kv_cache,
        batch.score,
        batch.position,
        batch.block_table,
        batch.kv_lens,
        num_evict,
        keep,
        layout=batch.spec.layout,
        impl=impl,
    )


def check_random_sets(
    spec: BatchSpec, impl: str, num_sets: int, exchange: bool = False
) -> None:
    spec = suited(spec, impl)
    generator = torch.Generator().manual_seed(3)
    batch = make_batch(spec)
    num_evict = eviction_of(spec)
    done = 0
    while done < num_sets:
        fill_side(batch, generator)
        keep = random_keep(batch, num_evict, generator)
        expected = compacted(batch, keep, num_evict, exchange)
        compact(batch, keep, num_evict, impl, exchange)
        assert torch.equal(batch.raw, expected)
        done += keep.shape[0] * keep.shape[1] * keep.shape[2]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_equals_gather_then_write(spec, any_impl, num_threads):
    """Bit equality of the whole storage: nothing else has moved."""
    check_random_sets(spec, any_impl, num_sets=20)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("spec", [s for s in SPECS if s.layout != "nhd"], ids=str)
def test_an_exchange_equals_gather_then_write_both_ways(spec, impl, num_threads):
    spec = suited(spec, impl)
    check_random_sets(spec, impl, num_sets=20, exchange=True)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_an_exchange_loses_nothing_and_puts_the_others_in_front(impl):
    batch = make_batch(SPECS[0])
    generator = torch.Generator().manual_seed(7)
    fill_side(batch, generator)
    num_evict = eviction_of(SPECS[0])
    keep = random_keep(batch, num_evict, generator)
    before = [batch.side(batch.position, r).clone() for r in range(len(LENS))]
    compact(batch, keep, num_evict, impl, exchange=True)
    for request, (kv_len, _) in enumerate(LENS):
        front = int(num_evict[request])
        after = batch.side(batch.position, request)
        for layer, head in np.ndindex(after.shape[:2]):
            kept = keep[layer, request, head, :kv_len]
            was, now = before[request][layer, head], after[layer, head]
            assert set(now[:front].tolist()) == set(was[~kept].tolist())
            assert set(now[front:].tolist()) == set(was[kept].tolist())


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("layout", ["vec", "amx"])
def test_a_thousand_random_sets(layout, block_size, num_threads):
    spec = BatchSpec(bf16, layout, 4, 4, 32, block_size, LENS, num_layers=2)
    check_random_sets(spec, "cpu", num_sets=1000)


def test_more_moves_than_a_block_has_threads(any_impl):
    spec = BatchSpec(bf16, "nhd", 1, 1, 64, 16, ((2000, 0),), num_layers=1)
    batch = make_batch(suited(spec, any_impl))
    generator = torch.Generator().manual_seed(6)
    fill_side(batch, generator)
    num_evict = torch.tensor([992]).int()
    for front in (992, 800, 513, 256):  # survivors in the front, and so moves
        keep = torch.zeros(1, 1, 1, 2000, dtype=torch.bool)
        keep[..., 992 - front : 992] = True
        back = 992 + torch.randperm(1008, generator=generator)[: 1008 - front]
        keep[..., back] = True
        expected = compacted(batch, keep, num_evict)
        compact(batch, keep, num_evict, any_impl)
        assert torch.equal(batch.raw, expected)


def test_elements_of_one_byte(any_impl):
    """fp8 caches: the moves look at the size of an element only."""
    layout = "hnd" if any_impl in ROW_IMPLS else "vec"
    spec = BatchSpec(torch.float8_e5m2, layout, 2, 2, 64, 32, LENS, num_layers=2)
    source = make_batch(BatchSpec(fp16, layout, 2, 2, 64, 32, LENS, num_layers=2))
    batch = byte_batch(source, spec)
    check_bytes = torch.Generator().manual_seed(3)
    num_evict = eviction_of(spec)
    keep = random_keep(batch, num_evict, check_bytes)
    expected = compacted(batch, keep, num_evict)
    compact(batch, keep, num_evict, any_impl)
    assert torch.equal(batch.raw, expected)


def byte_batch(source: PagedBatch, spec: BatchSpec) -> PagedBatch:
    """`source`'s tables over a cache of random bytes."""
    num_layers, num_blocks, heads, bs, width = source.kv_cache.shape
    page = page_bytes(heads, bs, width // 2, 1)
    generator = torch.Generator().manual_seed(5)
    total = num_layers * num_blocks * page
    raw = torch.randint(-128, 128, (total,), generator=generator, dtype=torch.int8)
    size = (num_layers, num_blocks, heads, bs, width)
    stride = (num_blocks * page, page, bs * width, width, 1)
    kv_cache = raw.view(spec.dtype).as_strided(size, stride)
    score, position = side_views(kv_cache)
    return PagedBatch(
        spec,
        raw,
        kv_cache,
        score,
        position,
        source.place,
        source.block_table,
        source.kv_lens,
        source.query,
        source.query_start_loc,
        source.query_positions,
    )


def test_survivors_are_the_same_tokens_as_before(any_impl):
    """(position, score) pairs as a multiset; retained slots did not move."""
    spec = suited(SPECS[0], any_impl)
    batch = make_batch(spec)
    generator = torch.Generator().manual_seed(4)
    fill_side(batch, generator)
    num_evict = eviction_of(spec)
    keep = random_keep(batch, num_evict, generator)
    before = [
        torch.stack((batch.side(batch.position, r), batch.side(batch.score, r)))
        for r in range(len(spec.lens))
    ]
    compact(batch, keep, num_evict, any_impl)
    for request, (kv_len, _) in enumerate(spec.lens):
        front = int(num_evict[request])
        position = batch.side(batch.position, request)
        score = batch.side(batch.score, request)
        for layer in range(spec.num_layers):
            for head in range(spec.num_kv_heads):
                kept = keep[layer, request, head, :kv_len]
                want = before[request][:, layer, head, kept]
                got = torch.stack((position[layer, head], score[layer, head]))[
                    :, front:
                ]
                assert sorted(map(tuple, want.T.tolist())) == sorted(
                    map(tuple, got.T.tolist())
                )
                stayed = kept[front:]
                assert torch.equal(
                    got[:, stayed], before[request][:, layer, head, front:][:, stayed]
                )


@pytest.mark.parametrize("extra", [1, -1])
def test_a_wrong_number_of_survivors_moves_nothing(extra, raising_impl):
    spec = BatchSpec(lens=((64, 0),), num_query_heads=1, num_kv_heads=1)
    spec = suited(spec, raising_impl)
    batch = make_batch(spec)
    keep = torch.zeros(1, 1, 1, 64, dtype=torch.bool)
    keep[..., : 32 + extra] = True
    before = batch.raw.clone()
    with pytest.raises(ValueError, match="^keep: number of survivors"):
        compact(batch, keep, torch.tensor([32]).int(), raising_impl)
    assert torch.equal(batch.raw, before)


@pytest.mark.parametrize("impl", ["cpu"])
def test_offsets_beyond_32_bits(impl):
    """A cache of 4.8 GB of which only a few pages are ever touched."""
    heads, bs, size, num_blocks = 8, 128, 128, 9000
    page = page_bytes(heads, bs, size, 2)
    raw = torch.empty(num_blocks * page, dtype=torch.int8)
    assert raw.numel() // 2 > 2**31  # elements, not only bytes
    width = 2 * size
    kv_cache = raw.view(bf16).as_strided(
        (1, num_blocks, heads, bs, width),
        (num_blocks * page // 2, page // 2, bs * width, width, 1),
    )
    score, position = side_views(kv_cache)
    table = torch.tensor([[num_blocks - 1, num_blocks - 2]], dtype=torch.int32)
    slots = torch.cat([torch.arange(bs) + int(block) * bs for block in table[0]])
    kv_cache[0, table[0].long()] = torch.randn(2, heads, bs, width).to(bf16)
    kv_lens = torch.tensor([2 * bs], dtype=torch.int32)
    ops.reset_slots(score, position, slots, torch.arange(2 * bs) + 50, impl=impl)
    query = torch.randn(1, heads, size).to(bf16)
    ops.score_keys(
        query,
        kv_cache[0],
        score[0],
        position[0],
        table,
        kv_lens,
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([2 * bs + 49]),
        torch.ones(1),
        torch.tensor([11]),
        layer_index=0,
        first_query_head=0,
        scale=size**-0.5,
        soft_cap=0.0,
        layout="vec",
        impl=impl,
    )
    got = score[0, table[0].long()]  # [2, heads, bs]
    assert torch.allclose(got.sum((0, 2)), torch.ones(heads), rtol=1e-5)
    num_evict = torch.tensor([bs], dtype=torch.int32)
    one = torch.tensor([0], dtype=torch.int32)
    keep = ops.select_keep(
        score,
        position,
        table,
        kv_lens,
        num_evict,
        one,
        torch.tensor([50 + 2 * bs], dtype=torch.int32),
        one + 1,
        torch.zeros(1, dtype=torch.bool),
        torch.zeros(1, dtype=torch.int64),
        max_kv_len=2 * bs,
        impl=impl,
    )
    in_slots = got.permute(1, 0, 2).flatten(1)
    best = in_slots.topk(bs, dim=1)
    assert torch.equal(keep[0, 0].nonzero()[:, 1].view(heads, bs), best[1].sort(1)[0])
    ops.compact_kv(
        kv_cache,
        score,
        position,
        table,
        kv_lens,
        num_evict,
        keep,
        layout="vec",
        impl=impl,
    )
    assert torch.equal(score[0, num_blocks - 2].sort(1)[0], best[0].sort(1)[0])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("keep", {"keep": torch.zeros(1, 1, 1, 64)}),
        ("keep", {"keep": torch.zeros(2, 1, 1, 64, dtype=torch.bool)}),
        ("kv_lens", {"keep": torch.zeros(1, 1, 1, 60, dtype=torch.bool)}),
        ("num_evict", {"num_evict": torch.tensor([65]).int()}),
        ("num_evict", {"num_evict": torch.tensor([-1]).int()}),
        ("layout", {"layout": "amx"}),
        ("score", {"score": torch.zeros(1, 1, 1, 32)}),
        ("position", {"position": torch.zeros(1, 5, 1, 32)}),
        ("kv_cache", {"kv_cache": torch.zeros(1, 5, 1, 16, 128)}),
        ("kv_cache", {"kv_cache": torch.zeros(1, 5, 1, 32, 80)}),
    ],
)
def test_bad_arguments_are_named(name, change):
    spec = BatchSpec(lens=((64, 0),), num_query_heads=1, num_kv_heads=1)
    batch = make_batch(spec)
    arguments = {
        "kv_cache": batch.kv_cache,
        "score": batch.score,
        "position": batch.position,
        "num_evict": torch.tensor([32]).int(),
        "keep": torch.zeros(1, 1, 1, 64, dtype=torch.bool),
        "layout": "vec",
    }
    arguments.update(change)
    with pytest.raises(ValueError, match=f"^{name}:"):
        ops.compact_kv(
            block_table=batch.block_table,
            kv_lens=batch.kv_lens,
            impl="cpu",
            **arguments,
        )
