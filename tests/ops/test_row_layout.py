# SPDX-License-Identifier: Apache-2.0
"""What the operators of a GPU refuse, and large offsets into a cache of rows."""

import pytest
import torch

from keyformer_vllm import ops
from tests.helpers import BatchSpec, make_batch
from tests.implementations import use_impl

bf16 = torch.bfloat16
SPEC = BatchSpec(bf16, "nhd", 4, 2, 64, 16, ((40, 2),))


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    yield from use_impl("emulated", monkeypatch)


def misaligned(like: torch.Tensor) -> torch.Tensor:
    """The same shape and strides, 2 bytes behind a multiple of 16."""
    room = torch.zeros(like.untyped_storage().nbytes() // 2 + 64, dtype=like.dtype)
    return room.as_strided(like.shape, like.stride(), 1)


def score(**change: object) -> None:
    batch = make_batch(SPEC)
    arguments: dict[str, object] = {
        "query": batch.query,
        "kv_cache": batch.kv_cache[0],
        "score": batch.score[0],
        "position": batch.position[0],
        "block_table": batch.block_table,
        "kv_lens": batch.kv_lens,
        "query_start_loc": batch.query_start_loc,
        "query_positions": batch.query_positions,
        "tau": torch.ones(2),
        "noise_keys": torch.zeros(1, dtype=torch.int64),
        "layout": "nhd",
    }
    arguments.update(change)
    ops.score_keys(
        layer_index=0,
        first_query_head=0,
        scale=0.125,
        soft_cap=0.0,
        impl="emulated",
        **arguments,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layout", {"layout": "vec"}),
        ("query", {"query": torch.zeros(2, 4, 32, dtype=bf16)}),
        ("query", {"query": torch.zeros(2, 4, 64)}),
        ("query", {"query": torch.zeros(2, 3, 64, dtype=bf16)}),
        ("query", {"query": torch.zeros(2, 4, 65, dtype=bf16)[..., :64]}),
        ("query", {"query": misaligned(torch.zeros(2, 4, 64, dtype=bf16))}),
        ("kv_cache", {"kv_cache": misaligned(make_batch(SPEC).kv_cache[0])}),
        ("kv_cache", {"kv_cache": torch.zeros(6, 2, 16, 128)}),
        ("kv_cache", {"kv_cache": torch.zeros(6, 2, 16, 160, dtype=bf16)[..., :144]}),
        ("kv_cache", {"kv_cache": torch.zeros(6, 2, 24, 128, dtype=bf16)}),
        ("score", {"score": torch.zeros(6, 2, 32)}),
        ("position", {"position": torch.zeros(6, 2, 16)}),
        ("kv_lens", {"kv_lens": torch.tensor([40])}),
        ("query_start_loc", {"query_start_loc": torch.tensor([0, 2])}),
        ("alibi_slopes", {"alibi_slopes": torch.zeros(3)}),
    ],
)
def test_bad_arguments_are_named(name, change):
    with pytest.raises(ValueError, match=f"^{name}[: ]"):
        score(**change)


def test_good_arguments_are_taken():
    score()


def test_an_operator_that_an_implementation_lacks_is_named():
    with pytest.raises(RuntimeError, match="'emulated' has no no_such_operator"):
        ops._operator("no_such_operator", "emulated")


def test_offsets_beyond_32_bits():
    """A cache of 8.6 GB of which only a few pages are ever touched."""
    heads, block_size, size, num_blocks = 8, 16, 128, 140_000
    width = 2 * size
    by_token = (heads * block_size * width, width, heads * width, 1)
    total = num_blocks * by_token[0]
    assert total > 2**32
    shape = (1, num_blocks, heads, block_size, width)
    kv_cache = torch.empty(total, dtype=bf16).as_strided(shape, (total, *by_token))
    side = (1, num_blocks, heads, block_size)
    score = torch.empty(side)
    position = torch.empty(side, dtype=torch.int32)
    blocks = torch.tensor([num_blocks - 1, 3, num_blocks - 2])
    tokens = torch.randn(3, heads, block_size, width).to(bf16)
    kv_cache[0, blocks] = tokens
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
    ops.reset_slots(score, position, slots, torch.arange(48), impl="emulated")
    keep = torch.zeros(1, 1, heads, 48, dtype=torch.bool)
    keep[..., 5:10] = True  # five survivors of the first block
    keep[..., 16:43] = True
    ops.compact_kv(
        kv_cache,
        score,
        position,
        blocks[None].int(),
        torch.tensor([48], dtype=torch.int32),
        torch.tensor([16], dtype=torch.int32),
        keep,
        layout="nhd",
        impl="emulated",
    )
    assert torch.equal(kv_cache[0, num_blocks - 2, :, 11:], tokens[0, :, 5:10])
    assert (position[0, num_blocks - 2, :, 11:] == torch.arange(5, 10)).all()
    query = torch.randn(1, heads, size).to(bf16)
    ops.score_keys(
        query,
        kv_cache[0],
        score[0],
        position[0],
        blocks[None, 1:].int(),
        torch.tensor([32], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([47]),
        torch.ones(1),
        torch.tensor([11]),
        layer_index=0,
        first_query_head=0,
        scale=size**-0.5,
        soft_cap=0.0,
        layout="nhd",
        impl="emulated",
    )
    got = score[0, blocks[1:]]  # [2, heads, block_size]
    assert torch.allclose(got.sum((0, 2)), torch.ones(heads), rtol=1e-5)
