# SPDX-License-Identifier: Apache-2.0
"""One rank of a group that scores, selects and compacts its share of a model.

``python -m tests.adapters.rank_driver RANK STORE RESULT`` joins a group of four
processes over gloo and writes what its heads keep, as JSON.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from keyformer_vllm import ops
from keyformer_vllm.adapters.ranks import HeadShare, RankCheck, ReplicaGroup
from tests.helpers import BatchSpec, PagedBatch, make_batch

WORLD_SIZE = 4
LENGTHS = ((160, 40), (131, 20))
NUM_EVICT = 32
NUM_QUERY_HEADS = 8
NUM_LAYERS = 4

CASES = {
    # Name: (tensor-parallel ranks, pipeline stages, KV heads).
    "two ranks per KV head": (4, 1, 2),
    "one KV head for all": (4, 1, 1),
    "a KV head each": (4, 1, 4),
    "two stages of two replicas": (2, 2, 1),
}

Kept = list[list[list[list[list[int]]]]]
"""Eviction -> layer -> request -> KV head -> sorted positions."""


def keep(
    total_kv_heads: int,
    share: HeadShare,
    num_query_heads: int,
    layers: range,
    random: bool,
    replicas: ReplicaGroup | None,
) -> Kept:
    """Two evictions of a rank that holds some heads of some layers.

    All ranks draw the same model and requests, and look at their part of them.
    """
    spec = BatchSpec(
        num_query_heads=NUM_QUERY_HEADS,
        num_kv_heads=total_kv_heads,
        lens=LENGTHS,
        num_layers=NUM_LAYERS,
    )
    batch = make_batch(spec)
    num_kv_heads = max(1, total_kv_heads * num_query_heads // NUM_QUERY_HEADS)
    kv_heads = slice(share.first_kv_head, share.first_kv_head + num_kv_heads)
    query = batch.query[:, share.first_query_head :][:, :num_query_heads]
    stage = slice(layers.start, layers.stop)
    cache, score, position = (
        tensor[stage, :, kv_heads]
        for tensor in (batch.kv_cache, batch.score, batch.position)
    )
    noise_keys = torch.tensor([7, 8])
    table, kv_lens, kept = batch.block_table, batch.kv_lens.clone(), []
    counts = torch.full((2,), NUM_EVICT, dtype=torch.int32)
    none = torch.zeros(2, dtype=torch.int32)
    for _ in range(2):
        for index, layer in enumerate(layers):
            ops.score_keys(
                query,
                cache[index],
                score[index],
                position[index],
                table,
                kv_lens,
                batch.query_start_loc,
                batch.query_positions,
                torch.ones(len(query)),
                noise_keys,
                layer_index=layer,
                first_query_head=share.first_query_head,
                scale=0.3,
                soft_cap=0.0,
                layout=spec.layout,
                impl="cpu",
            )
        chosen_score, chosen_position, chosen_table = score, position, table
        if replicas is not None:
            rows = [
                row[: -(-int(n) // 32)]
                for row, n in zip(table.tolist(), kv_lens, strict=True)
            ]
            chosen_score, chosen_position, numbers = replicas.selection(
                score, position, rows
            )
            width = max(map(len, numbers))
            chosen_table = torch.tensor(
                [row + [0] * (width - len(row)) for row in numbers], dtype=torch.int32
            )
        mask = ops.select_keep(
            chosen_score,
            chosen_position,
            chosen_table,
            kv_lens,
            counts,
            none,
            none + 2**30,
            none + 1,
            torch.tensor([random, random]),
            noise_keys,
            max_kv_len=int(kv_lens.max()),
            first_layer=layers.start,
            first_kv_head=share.first_kv_head,
            impl="cpu",
        )
        ops.compact_kv(
            cache,
            score,
            position,
            table,
            kv_lens,
            counts,
            mask,
            layout=spec.layout,
            impl="cpu",
        )
        table, kv_lens = table[:, 1:].contiguous(), kv_lens - NUM_EVICT
        kept.append(_positions(batch, position, table, kv_lens))
    return kept


def _positions(
    batch: PagedBatch,
    position: torch.Tensor,
    table: torch.Tensor,
    kv_lens: torch.Tensor,
) -> list[list[list[list[int]]]]:
    size = batch.spec.block_size
    held = [
        position[:, row[: -(-n // size)].long()].transpose(1, 2).flatten(2)[..., :n]
        for row, n in zip(table, kv_lens.tolist(), strict=True)
    ]
    return [
        [request[layer].sort(-1).values.tolist() for request in held]
        for layer in range(len(position))
    ]


def main() -> None:
    rank, store, result = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=120),
    )
    found: dict[str, object] = {}
    for name, (tp_size, stages, total_kv_heads) in CASES.items():
        num_query_heads = NUM_QUERY_HEADS // tp_size
        share = HeadShare.of_rank(
            rank % tp_size,
            tp_size,
            num_query_heads=num_query_heads,
            num_kv_heads=max(1, total_kv_heads // tp_size),
            total_query_heads=NUM_QUERY_HEADS,
            total_kv_heads=total_kv_heads,
        )
        replicas = None
        if share.num_replicas > 1:
            replicas = ReplicaGroup.create(share.num_replicas)
        stage, depth = rank // tp_size, NUM_LAYERS // stages
        layers = range(stage * depth, (stage + 1) * depth)
        found[name] = {
            "kv_head": share.first_kv_head,
            "layers": [layers.start, layers.stop],
            "kept": {
                str(random): keep(
                    total_kv_heads, share, num_query_heads, layers, random, replicas
                )
                for random in (False, True)
            },
        }
    check = RankCheck(dist.group.WORLD)
    check.compare("a number", 5)
    try:
        check.compare("a number", 6 if rank == 2 else 5)
    except RuntimeError as error:
        found["refused"] = str(error)
    result.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
