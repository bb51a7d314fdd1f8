# SPDX-License-Identifier: Apache-2.0
"""The views of ops/layout.py against offsets written down a second time."""

import pytest
import torch

from keyformer_vllm.ops import layout as layouts
from tests.helpers import BatchSpec, key_offsets, make_batch, value_offsets

CASES = [
    (torch.float32, "vec", 64, 32),
    (torch.float32, "vec16", 80, 64),
    (torch.bfloat16, "amx", 64, 32),
    (torch.bfloat16, "amx", 112, 128),
    (torch.float16, "vec", 128, 64),
]
ROW_CASES = [(torch.bfloat16, "nhd", 80, 16), (torch.float16, "hnd", 128, 64)]


def packer(layout):
    """A write_fn for probe_layout that packs by offsets."""

    def write(key, value, kv_cache, slots):
        _, heads, block_size, width = kv_cache.shape
        flat = kv_cache.flatten(2)
        for offsets, rows in ((key_offsets, key), (value_offsets, value)):
            at = offsets(layout, block_size, width // 2)[slots % block_size]
            for head in range(heads):
                flat[(slots // block_size)[:, None], head, at] = rows[:, head]

    return write


def probe(write_fn, dtype, layout, head_size, block_size):
    layouts.probe_layout(
        write_fn,
        num_kv_heads=3,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        layout=layout,
    )


@pytest.mark.parametrize(
    ("dtype", "layout", "head_size", "block_size"), CASES + ROW_CASES
)
def test_views_read_what_offsets_wrote(dtype, layout, head_size, block_size):
    spec = BatchSpec(dtype, layout, 3, 3, head_size, block_size, ((113, 0), (20, 0)))
    batch = make_batch(spec)
    for tokens, view in (
        (batch.keys, layouts.key_view(batch.kv_cache[0], layout)),
        (batch.values, layouts.value_view(batch.kv_cache[0], layout)),
    ):
        for request, rows in enumerate(tokens):
            for head in range(3):
                got = layouts.read_tokens(view, batch.slots(request), head)
                assert torch.equal(got, rows[0, :, head])


@pytest.mark.parametrize(
    ("dtype", "layout", "head_size", "block_size"), CASES + ROW_CASES
)
def test_views_write_where_offsets_say(dtype, layout, head_size, block_size):
    spec = BatchSpec(dtype, layout, 2, 2, head_size, block_size, ((40, 0),))
    batch = make_batch(spec)
    before = batch.raw.clone()
    views = (
        (batch.keys[0], layouts.key_view(batch.kv_cache[0], layout)),
        (batch.values[0], layouts.value_view(batch.kv_cache[0], layout)),
    )
    for rows, view in views:
        for head in range(2):
            slots = batch.slots(0)
            layouts.write_tokens(view, slots, head, torch.zeros_like(rows[0, :, head]))
    assert not torch.equal(batch.raw, before)
    for rows, view in views:
        for head in range(2):
            layouts.write_tokens(view, batch.slots(0), head, rows[0, :, head])
    assert torch.equal(batch.raw, before)


@pytest.mark.parametrize("layout", ["vec", "amx"])
def test_offsets_of_a_block_are_a_bijection(layout):
    both = torch.cat(
        (key_offsets(layout, 64, 96), value_offsets(layout, 64, 96))
    ).flatten()
    assert torch.equal(both.sort()[0], torch.arange(2 * 64 * 96))


def test_side_data_lies_behind_k_and_v():
    kv_cache = layouts.allocate_cache(2, 5, 3, 32, 64, torch.bfloat16)
    score, position = layouts.side_views(kv_cache)
    assert score.shape == position.shape == (2, 5, 3, 32)
    page = layouts.page_bytes(3, 32, 64, 2)
    assert page % 64 == 0 and kv_cache.stride(1) * 2 == page
    content = 3 * 32 * 128 * 2
    assert page - content >= layouts.side_bytes(3, 32) == 3 * 32 * 8
    start = kv_cache[1, 4].data_ptr() + content
    assert score[1, 4].data_ptr() == start
    assert position[1, 4].data_ptr() == start + 3 * 32 * 4
    kv_cache.zero_()
    score.fill_(1.0)
    position.fill_(2)
    assert not kv_cache.any()
    assert (score == 1.0).all() and (position == 2).all()
    one_layer = layouts.side_views(kv_cache[1])
    assert one_layer[0].data_ptr() == score[1].data_ptr()
    assert one_layer[1].stride() == position[1].stride()


def test_places_lie_behind_the_positions():
    kv_cache = layouts.allocate_cache(2, 5, 3, 32, 64, torch.bfloat16, has_places=True)
    page = layouts.page_bytes(3, 32, 64, 2, has_places=True)
    assert page % 64 == 0 and kv_cache.stride(1) * 2 == page
    assert page - 3 * 32 * 128 * 2 >= layouts.side_bytes(3, 32, True) == 3 * 32 * 12
    score, position = layouts.side_views(kv_cache)
    place = layouts.place_view(kv_cache)
    assert (place.shape, place.stride()) == (position.shape, position.stride())
    assert place[1, 4].data_ptr() == position[1, 4].data_ptr() + 3 * 32 * 4
    place.fill_(7)
    assert not kv_cache.any() and not score.any() and not position.any()
    assert torch.equal(layouts.place_view(kv_cache[1]), place[1])
    with pytest.raises(ValueError, match="no room for side data"):
        layouts.place_view(layouts.allocate_cache(2, 5, 3, 32, 64, torch.bfloat16))


def test_pages_without_room_are_refused():
    with pytest.raises(ValueError, match="no room for side data"):
        layouts.side_views(torch.zeros(4, 2, 32, 128))
    with pytest.raises(ValueError, match="must be contiguous"):
        layouts.side_views(torch.zeros(4, 2, 32, 256)[..., :128])


def test_side_data_does_not_care_how_rows_lie_in_a_page():
    shape = (2, 5, 3, 16, 64, torch.bfloat16)
    by_head = layouts.allocate_cache(*shape, layout="hnd")
    by_token = layouts.allocate_cache(*shape, layout="nhd")
    assert by_token.shape == by_head.shape
    assert by_token.stride()[2:] == (128, 3 * 128, 1)
    for one, other in zip(
        layouts.side_views(by_head), layouts.side_views(by_token), strict=True
    ):
        assert one.stride() == other.stride()
        assert one.storage_offset() == other.storage_offset()


@pytest.mark.parametrize(("dtype", "layout", "head_size", "block_size"), CASES)
def test_probe_accepts_the_right_packing(dtype, layout, head_size, block_size):
    probe(packer(layout), dtype, layout, head_size, block_size)


def test_probe_refuses_another_packing():
    with pytest.raises(RuntimeError, match="does not store K in the layout 'amx'"):
        probe(packer("vec"), torch.bfloat16, "amx", 64, 32)
    with pytest.raises(RuntimeError, match="does not store K in the layout 'vec'"):
        probe(packer("amx"), torch.bfloat16, "vec", 64, 32)


def test_probe_refuses_a_wrong_value():
    def wrong(key, value, kv_cache, slots):
        packer("vec")(key, value + 1, kv_cache, slots)

    with pytest.raises(RuntimeError, match="does not store V"):
        probe(wrong, torch.float32, "vec", 64, 32)


def test_probe_refuses_writes_into_the_padding():
    def wrong(key, value, kv_cache, slots):
        packer("vec")(key, value, kv_cache, slots)
        layouts.side_views(kv_cache)[0][2, 1, 5] = 0.0

    with pytest.raises(RuntimeError, match="writes into the padding"):
        probe(wrong, torch.float32, "vec", 64, 32)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("layout", (torch.float32, "neon", 64, 32)),
        ("layout", (torch.float32, "amx", 64, 32)),
        ("block_size", (torch.float32, "vec", 64, 16)),
        ("head_size", (torch.float32, "vec", 40, 32)),
    ],
)
def test_unknown_caches_are_refused(name, case):
    dtype, layout, head_size, block_size = case
    with pytest.raises(ValueError, match=f"^{name}"):
        probe(packer("vec"), dtype, layout, head_size, block_size)
