# SPDX-License-Identifier: Apache-2.0
"""The operators in plain PyTorch: slow, readable, and what the kernels are held to."""

import torch

from keyformer_vllm.core import scoring, selection
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
    alibi_slopes: torch.Tensor | None,
    place: torch.Tensor | None,
    sinks: torch.Tensor | None,
    layer_index: int,
    first_query_head: int,
    scale: float,
    soft_cap: float,
    layout: str,
) -> None:
    num_kv_heads, block_size = kv_cache.shape[1:3]
    keys = layouts.key_view(kv_cache, layout)
    starts = query_start_loc.tolist()
    for request, kv_len in enumerate(kv_lens.tolist()):
        begin, end = starts[request], starts[request + 1]
        scored = torch.nonzero(tau[begin:end] > 0).flatten()
        if len(scored) == 0:
            continue
        tokens = begin + scored
        visible = kv_len - (end - begin) + scored + 1  # keys each row sees
        slots = request_slots(block_table[request], kv_len, block_size)
        index = slots // block_size, slice(None), slots % block_size
        key = [layouts.read_tokens(keys, slots, head) for head in range(num_kv_heads)]
        shares = scoring.score_rows(
            query[tokens].float().transpose(0, 1),
            torch.stack(key).float(),
            query_positions[tokens],
            position[index].T,
            tau[tokens],
            torch.arange(kv_len) < visible[:, None],
            noise_key=int(noise_keys[request]),
            layer_index=layer_index,
            first_query_head=first_query_head,
            scale=scale,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
            query_place=None if place is None else visible - 1,
            key_place=None if place is None else place[index].T,
            sinks=sinks,
        )
        # Row by row, as the kernels add: chunking a prompt changes no bit of a sum.
        total = score[index].T
        for row in shares.unbind(1):
            total = total + row
        score[index] = total.T


def paged_attention_scored(
    output: torch.Tensor,
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
    alibi_slopes: torch.Tensor | None,
    place: torch.Tensor | None,
    sinks: torch.Tensor | None,
    layer_index: int,
    first_query_head: int,
    scale: float,
    soft_cap: float,
    layout: str,
) -> None:
    _attend(
        output,
        query,
        kv_cache,
        position,
        block_table,
        kv_lens,
        query_start_loc,
        query_positions,
        alibi_slopes,
        place,
        sinks,
        scale,
        soft_cap,
        layout,
    )
    score_keys(
        query,
        kv_cache,
        score,
        position,
        block_table,
        kv_lens,
        query_start_loc,
        query_positions,
        tau,
        noise_keys,
        alibi_slopes,
        place,
        sinks,
        layer_index,
        first_query_head,
        scale,
        soft_cap,
        layout,
    )


def paged_attention_audited(
    output: torch.Tensor,
    audit: torch.Tensor,
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
    front_blocks: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    layer_index: int,
    first_query_head: int,
    scale: float,
    soft_cap: float,
    layout: str,
) -> None:
    _attend(
        output,
        query,
        kv_cache,
        position,
        block_table,
        kv_lens,
        query_start_loc,
        query_positions,
        alibi_slopes,
        None,
        sinks,
        scale,
        soft_cap,
        layout,
        front_blocks=front_blocks,
        audit=audit,
    )
    columns = torch.arange(block_table.shape[1]) + front_blocks[:, None]
    score_keys(
        query,
        kv_cache,
        score,
        position,
        block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1)),
        kv_lens - front_blocks * kv_cache.shape[2],
        query_start_loc,
        query_positions,
        tau,
        noise_keys,
        alibi_slopes,
        None,
        sinks,
        layer_index,
        first_query_head,
        scale,
        soft_cap,
        layout,
    )


def _attend(
    output: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_positions: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    place: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
    layout: str,
    *,
    front_blocks: torch.Tensor | None = None,
    audit: torch.Tensor | None = None,
) -> None:
    num_kv_heads, block_size = kv_cache.shape[1:3]
    keys = layouts.key_view(kv_cache, layout)
    values = layouts.value_view(kv_cache, layout)
    starts = query_start_loc.tolist()
    for request, kv_len in enumerate(kv_lens.tolist()):
        begin, end = starts[request], starts[request + 1]
        if begin == end:
            continue
        slots = request_slots(block_table[request], kv_len, block_size)
        index = slots // block_size, slice(None), slots % block_size
        key, value = (
            torch.stack(
                [layouts.read_tokens(view, slots, head) for head in range(num_kv_heads)]
            ).float()
            for view in (keys, values)
        )
        visible = kv_len - (end - begin) + torch.arange(1, end - begin + 1)
        logits = scoring.attention_logits(
            query[begin:end].float().transpose(0, 1),
            key,
            scale,
            soft_cap,
            alibi_slopes=alibi_slopes,
            query_position=query_positions[begin:end] if place is None else visible - 1,
            key_position=(position if place is None else place)[index].T,
        )
        sees = torch.arange(kv_len) < visible[:, None]
        ones = torch.ones(end - begin)
        probability = scoring.noisy_softmax(logits, None, ones, sees, sinks)
        per_query_head = value.repeat_interleave(len(logits) // num_kv_heads, dim=0)
        attended = probability @ per_query_head
        output[begin:end] = attended.transpose(0, 1).to(output.dtype)
        if audit is None or front_blocks is None:
            continue
        front = int(front_blocks[request]) * block_size
        if not 0 <= front <= kv_len - (end - begin):
            raise ValueError(
                "front_blocks: negative, or beyond the keys before the request's "
                f"queries (request {request}, value {front // block_size})"
            )
        lost = probability[..., :front].sum(-1)
        sees &= torch.arange(kv_len) >= front
        rest = scoring.noisy_softmax(logits, None, ones, sees, sinks)
        change = attended - rest @ per_query_head
        norms = change.square().sum(-1), attended.square().sum(-1)
        audit[begin:end] = torch.stack((lost, *norms), -1).transpose(0, 1)


def reset_slots(
    score: torch.Tensor,
    position: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    block_size = score.shape[-1]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    block, offset = slots // block_size, slots % block_size
    # The two indices are apart, so theirs becomes the first dimension.
    score[:, block, :, offset] = 0.0
    position[:, block, :, offset] = positions[written, None, None].to(torch.int32)


def renumber_slots(
    place: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
) -> None:
    block_size = place.shape[-1]
    for request, kv_len in enumerate(kv_lens.tolist()):
        slots = request_slots(block_table[request], kv_len, block_size)
        index = slice(None), slots // block_size, slice(None), slots % block_size
        held = position[index]  # [kv_len, num_layers, num_kv_heads]
        order = held.argsort(dim=0)
        steps = held.gather(0, order).diff(dim=0)
        if bool((held < 0).any()) or bool((steps == 0).any()):
            raise ValueError(
                "position: negative or held twice by one KV head "
                f"(request {request}, value {kv_len})"
            )
        place[index] = order.argsort(dim=0).to(torch.int32)


def select_keep(
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_evicts: torch.Tensor,
    num_sinks: torch.Tensor,
    recent_start: torch.Tensor,
    run_size: torch.Tensor,
    random: torch.Tensor,
    noise_keys: torch.Tensor,
    max_kv_len: int,
    first_layer: int,
    first_kv_head: int,
) -> torch.Tensor:
    num_layers, _, num_kv_heads, block_size = score.shape
    shape = (num_layers, len(kv_lens), num_kv_heads, max_kv_len)
    keep = torch.zeros(shape, dtype=torch.bool)
    layer = first_layer + torch.arange(num_layers)[:, None, None]
    kv_head = first_kv_head + torch.arange(num_kv_heads)[:, None]
    for request, kv_len in enumerate(kv_lens.tolist()):
        num_evict = int(num_evicts[request])
        if num_evict == 0:
            keep[:, request, :, :kv_len] = True
            continue
        slots = request_slots(block_table[request], kv_len, block_size)
        index = slice(None), slots // block_size, slice(None), slots % block_size
        # Indexing puts the slots first: [kv_len, num_layers, num_kv_heads].
        scores, positions = score[index], position[index]
        scores, positions = scores.permute(1, 2, 0), positions.permute(1, 2, 0)
        if random[request]:
            scores = selection.random_rank(
                noise_keys[request], layer, kv_head, positions
            )
        sinks, start = int(num_sinks[request]), int(recent_start[request])
        pinned = ((positions < sinks) | (positions >= start)).sum(-1)
        if int(pinned.max()) > kv_len - num_evict:
            raise ValueError(
                "num_evict: sinks and recent tokens exceed what may stay "
                f"(request {request}, value {num_evict})"
            )
        keep[:, request, :, :kv_len] = selection.select_kept(
            scores,
            positions,
            kv_len - num_evict,
            sinks,
            start,
            run_size=int(run_size[request]),
        )
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
    _move_survivors(
        kv_cache, score, position, block_table, kv_lens, num_evict, keep, layout, False
    )


def exchange_kv(
    kv_cache: torch.Tensor,
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_evict: torch.Tensor,
    keep: torch.Tensor,
    layout: str,
) -> None:
    _move_survivors(
        kv_cache, score, position, block_table, kv_lens, num_evict, keep, layout, True
    )


def _move_survivors(
    kv_cache: torch.Tensor,
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_evict: torch.Tensor,
    keep: torch.Tensor,
    layout: str,
    exchange: bool,
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
                    raise ValueError(
                        "keep: number of survivors is not kv_len - num_evict "
                        f"(request {request}, value {front})"
                    )
                source = slots[:front][kept[:front]]
                target = slots[front:][~kept[front:]]
                for view in views:
                    rows = layouts.read_tokens(view, source, kv_head)
                    others = layouts.read_tokens(view, target, kv_head)
                    layouts.write_tokens(view, target, kv_head, rows)
                    if exchange:
                        layouts.write_tokens(view, source, kv_head, others)
                for side in (score[layer], position[layer]):
                    from_index, to_index = (
                        (slot // block_size, kv_head, slot % block_size)
                        for slot in (source, target)
                    )
                    others = side[to_index]
                    side[to_index] = side[from_index]
                    if exchange:
                        side[from_index] = others


def request_slots(
    block_row: torch.Tensor, kv_len: int, block_size: int
) -> torch.Tensor:
    """Slots [kv_len] int64 of a request's tokens, from its block table row."""
    index = torch.arange(kv_len)
    return block_row.long()[index // block_size] * block_size + index % block_size
