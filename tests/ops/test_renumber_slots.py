# SPDX-License-Identifier: Apache-2.0
"""renumber_slots: places are ranks by position, in every layer and head."""

import pytest
import torch

from keyformer_vllm import ops
from tests.helpers import BatchSpec, PagedBatch, make_batch


def run(batch: PagedBatch, impl: str, **changes: torch.Tensor) -> None:
    arguments = {
        "place": batch.place,
        "position": batch.position,
        "block_table": batch.block_table,
        "kv_lens": batch.kv_lens,
    }
    ops.renumber_slots(**(arguments | changes), impl=impl)


@pytest.mark.parametrize("block_size", [32, 128])
def test_places_are_ranks_by_position(block_size, any_impl, num_threads):
    """Positions above and below the borders of a machine word; an empty request."""
    bs = block_size
    lens = [(n, 0) for n in (1, bs - 1, bs, 0, bs + 1, 64, 65, 1023)]
    spec = BatchSpec(
        num_kv_heads=3,
        num_query_heads=3,
        block_size=bs,
        lens=tuple(lens),
        num_layers=2,
        head_size=32,
    )
    batch = make_batch(spec)
    batch.set_side(batch.position, 5, (torch.arange(64) * 64 + 63).expand(2, 3, -1))
    held = [batch.side(batch.position, r).clone() for r in range(len(lens))]
    written = torch.zeros_like(batch.place, dtype=torch.bool)
    for request in range(len(lens)):
        batch.set_side(written, request, torch.ones_like(held[request]))
    before, pages = batch.place.clone(), batch.raw.clone()
    run(batch, any_impl)
    for request, position in enumerate(held):
        lower = position[..., None, :] < position[..., :, None]
        assert torch.equal(batch.side(batch.place, request), lower.sum(-1).int())
    # Nothing but the places of the requests' own slots has changed.
    assert torch.equal(batch.place[~written], before[~written])
    assert torch.equal(batch.raw, pages)


def test_far_positions(any_impl):
    batch = make_batch(BatchSpec(lens=((5, 0),)))
    position = torch.tensor([10**7, 3, 131071, 0, 131072]).expand(1, 2, -1)
    batch.set_side(batch.position, 0, position)
    run(batch, any_impl)
    expected = torch.tensor([4, 1, 2, 0, 3]).int().expand(1, 2, -1)
    assert torch.equal(batch.side(batch.place, 0), expected)


@pytest.mark.parametrize("wrong", [[4, 1, 4], [4, -1, 2]], ids=["twice", "negative"])
def test_positions_that_no_request_can_hold_are_refused(wrong, raising_impl):
    """Catches places made from another request's slots, or from recycled ones."""
    batch = make_batch(BatchSpec(lens=((40, 0), (3, 0))))
    position = torch.tensor([[5, 1, 2], wrong])
    batch.set_side(batch.position, 1, position[None])
    with pytest.raises(ValueError, match=r"^position: .* \(request 1, value 3\)"):
        run(batch, raising_impl)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kv_lens", {"kv_lens": torch.tensor([10**6]).int()}),
        ("kv_lens", {"kv_lens": torch.tensor([-1]).int()}),
        ("block_table", {"block_table": torch.tensor([[0, 99, 0, 0, 0]]).int()}),
        ("position", {"position": torch.zeros(1, 7, 2, 32)}),
        ("place", {"place": torch.zeros(1, 7, 2, 32)}),
    ],
)
def test_bad_arguments_are_named(name, change):
    batch = make_batch(BatchSpec())
    with pytest.raises(ValueError, match=f"^{name}:"):
        run(batch, "cpu", **change)
