# SPDX-License-Identifier: Apache-2.0
"""The operators in plain PyTorch: slow, readable, and what the kernels are held to."""

import torch

from keyformer_vllm.core import noise
from keyformer_vllm.ops import layout as layouts


def score_keys(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_positions: torch.Tensor,
    tau: torch.Tensor,
    noise_keys: torch.Tensor,
    layer_index: int,
    first_query_head: int,
    scale: float,
    soft_cap: float,
    layout: str,
) -> None:
    num_kv_heads, block_size = kv_cache.shape[1:3]
    group = query.shape[1] // num_kv_heads
    keys = layouts.key_view(kv_cache, layout)
    starts = query_start_loc.tolist()
    for request, kv_len in enumerate(kv_lens.tolist()):
        begin, end = starts[request], starts[request + 1]
        scored = torch.nonzero(tau[begin:end] > 0).flatten()
        if len(scored) == 0:
            continue
        slots = request_slots(block_table[request], kv_len, block_size)
        visible = kv_len - (end - begin) + scored + 1
        tokens = begin + scored
        for kv_head in range(num_kv_heads):
            key = layouts.read_tokens(keys, slots, kv_head).float()
            index = slots // block_size, kv_head, slots % block_size
            shares = torch.zeros(len(scored), kv_len)
            for query_head in range(kv_head * group, (kv_head + 1) * group):
                logits = scale * (query[tokens, query_head].float() @ key.T)
                if soft_cap > 0:
                    logits = soft_cap * torch.tanh(logits / soft_cap)
                if (noise_key := int(noise_keys[request])) != noise.NO_NOISE:
                    rows = noise.row_keys(
                        noise_key,
                        layer_index,
                        first_query_head + query_head,
                        query_positions[tokens, None],
                    )
                    logits += noise.gumbel(rows, position[index])
                logits /= tau[tokens, None]
                hidden = torch.arange(kv_len) >= visible[:, None]
                logits.masked_fill_(hidden, -torch.inf)
                shares += torch.softmax(logits, dim=-1)
            # Row by row, as the kernels add: chunking a prompt changes no bit of a sum.
            total = score[index]
            for row in shares:
                total = total + row
            score[index] = total


def reset_slots(
    score: torch.Tensor,
    position: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    block_size = score.shape[-1]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    index = slots // block_size, slice(None), slots % block_size
    score[index] = 0.0
    position[index] = positions[written, None].to(torch.int32)


def select_keep(
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_evict: torch.Tensor,
    num_sinks: torch.Tensor,
    recent_start: torch.Tensor,
    run_size: torch.Tensor,
    random: torch.Tensor,
    noise_keys: torch.Tensor,
    max_kv_len: int,
) -> torch.Tensor:
    num_layers, _, num_kv_heads, block_size = score.shape
    keep = torch.zeros(
        (num_layers, len(kv_lens), num_kv_heads, max_kv_len), dtype=torch.bool
    )
    for request, kv_len in enumerate(kv_lens.tolist()):
        slots = request_slots(block_table[request], kv_len, block_size)
        num_kept = kv_len - int(num_evict[request])
        for layer in range(num_layers):
            for kv_head in range(num_kv_heads):
                index = layer, slots // block_size, kv_head, slots % block_size
                positions = position[index].long()
                ranked = score[index]
                if random[request]:
                    rows = noise.row_keys(
                        noise_keys[request], layer, kv_head, positions
                    )
                    ranked = noise.uniform(rows, positions)
                pinned = (positions < num_sinks[request]) | (
                    positions >= recent_start[request]
                )
                if num_kept == kv_len:
                    pinned.fill_(True)
                num_best = num_kept - int(pinned.sum())
                if num_best < 0:
                    raise RuntimeError(
                        f"num_evict: sinks and recent tokens exceed what may stay "
                        f"(request {request}, value {int(num_evict[request])})"
                    )
                candidates = torch.nonzero(~pinned).flatten()
                best = _best_candidates(
                    ranked[candidates],
                    positions[candidates],
                    num_best,
                    int(run_size[request]),
                )
                pinned[candidates[best]] = True
                keep[layer, request, kv_head, :kv_len] = pinned
    return keep


def compact_kv(
    kv_cache: torch.Tensor,
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_evict: torch.Tensor,
    keep: torch.Tensor,
    layout: str,
) -> None:
    num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    for layer in range(num_layers):
        views = (
            layouts.key_view(kv_cache[layer], layout),
            layouts.value_view(kv_cache[layer], layout),
        )
        for request, kv_len in enumerate(kv_lens.tolist()):
            front = int(num_evict[request])
            if front == 0:
                continue
            slots = request_slots(block_table[request], kv_len, block_size)
            for kv_head in range(num_kv_heads):
                kept = keep[layer, request, kv_head, :kv_len]
                if int(kept.sum()) != kv_len - front:
                    raise RuntimeError(
                        "keep: number of survivors is not kv_len - num_evict "
                        f"(request {request}, value {front})"
                    )
                source = slots[:front][kept[:front]]
                target = slots[front:][~kept[front:]]
                for view in views:
                    rows = layouts.read_tokens(view, source, kv_head)
                    layouts.write_tokens(view, target, kv_head, rows)
                for side in (score[layer], position[layer]):
                    side[target // block_size, kv_head, target % block_size] = side[
                        source // block_size, kv_head, source % block_size
                    ]


def request_slots(
    block_row: torch.Tensor, kv_len: int, block_size: int
) -> torch.Tensor:
    """Slots [kv_len] int64 of a request's tokens, from its block table row."""
    index = torch.arange(kv_len)
    return block_row.long()[index // block_size] * block_size + index % block_size


def _best_candidates(
    scores: torch.Tensor, positions: torch.Tensor, count: int, run_size: int
) -> torch.Tensor:
    """Indices of the `count` best: by score, NaN last, ties to the lower position.

    With a run size above 1 the score of a token is the sum over its run, whole runs
    are taken and the last one in part. Sums are fp64: exact for a few floats, so that
    their order does not matter.
    """
    by_position = torch.argsort(positions, stable=True)
    runs = positions[by_position] // run_size
    run_ids, run_of = torch.unique_consecutive(runs, return_inverse=True)
    sums = torch.zeros(len(run_ids), dtype=torch.float64)
    sums.index_add_(0, run_of, scores[by_position].double())
    ranked = sums[run_of]
    # Stable sorts, least important key first: position, score, numbers before NaN.
    by_score = torch.argsort(ranked.nan_to_num(nan=0.0), descending=True, stable=True)
    nan_last = torch.argsort(ranked[by_score].isnan().int(), stable=True)
    return by_position[by_score[nan_last]][:count]
