# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from keyformer_vllm import ops
from tests.helpers import BatchSpec, make_batch


@pytest.mark.parametrize("num_tokens", [0, 1, 40, 2500])
def test_only_written_slots_change(num_tokens, any_impl, num_threads):
    spec = BatchSpec(
        num_kv_heads=3, num_query_heads=3, lens=((3000, 0),), head_size=32, num_layers=2
    )
    batch = make_batch(spec)
    batch.score.fill_(2.5)
    slots = batch.slots(0)[torch.randperm(3000)[:num_tokens]]
    slots[::7] = -1  # padding
    positions = torch.arange(num_tokens) + 77
    expected = batch.raw.clone()
    score, position = batch.score.clone(), batch.position.clone()
    for slot, value in zip(slots.tolist(), positions.tolist(), strict=True):
        if slot >= 0:
            score[:, slot // 32, :, slot % 32] = 0.0
            position[:, slot // 32, :, slot % 32] = value
    ops.reset_slots(batch.score, batch.position, slots, positions, impl=any_impl)
    assert torch.equal(batch.score, score) and torch.equal(batch.position, position)
    # K, V and the padding of the pages: put the side data back and compare all.
    batch.score.fill_(2.5)
    batch.position.view(torch.int32).copy_(torch.where(score == 0, -9, position))
    kept = batch.raw.clone()
    batch.raw.copy_(expected)
    batch.position.copy_(torch.where(score == 0, -9, position))
    assert torch.equal(batch.raw, kept)


@pytest.mark.parametrize(
    ("name", "slots", "positions"),
    [
        ("slot_mapping", torch.tensor([10**9]), torch.tensor([0])),
        ("slot_mapping", torch.tensor([1]).int(), torch.tensor([0])),
        ("positions", torch.tensor([1]), torch.tensor([0, 1])),
    ],
)
def test_bad_arguments_are_named(name, slots, positions):
    batch = make_batch(BatchSpec())
    with pytest.raises(ValueError, match=f"^{name}:"):
        ops.reset_slots(batch.score, batch.position, slots, positions, impl="cpu")
