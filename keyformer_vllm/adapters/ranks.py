# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: whose heads a rank holds, and what ranks must agree on.

Each rank evicts by its own heads and, as a rule, talks to nobody: counts come from
the scheduler's plan. Two things need the others. Where there are more ranks than KV
heads, several ranks hold the same one with different query heads ("replicas"), and
must keep the same tokens. And a debug mode asserts that counts are equal everywhere.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from keyformer_vllm import __version__
from keyformer_vllm.adapters import compat, engine_args
from keyformer_vllm.config import VERSION_KEY, KVPolicyError


@dataclass(frozen=True)
class HeadShare:
    """The heads of the model that one tensor-parallel rank holds.

    Args:
        first_query_head: index in the model of the rank's first query head.
        first_kv_head: index in the model of its first KV head.
        num_replicas: ranks, this one included, that hold the same KV heads.
    """

    first_query_head: int
    first_kv_head: int
    num_replicas: int

    @classmethod
    def of_rank(
        cls,
        tp_rank: int,
        tp_size: int,
        *,
        num_query_heads: int,
        num_kv_heads: int,
        total_query_heads: int,
        total_kv_heads: int,
    ) -> HeadShare:
        """How vLLM shares heads out (``QKVParallelLinear``): in order of ranks.

        Args:
            tp_rank: the rank within its group.
            tp_size: ranks of the group.
            num_query_heads: query heads of each rank.
            num_kv_heads: KV heads of each rank.
            total_query_heads: query heads of the model.
            total_kv_heads: KV heads of the model.

        Raises:
            RuntimeError: when the model shares its heads out in another way.
        """
        num_replicas, rest = divmod(tp_size * num_kv_heads, total_kv_heads)
        shared = num_kv_heads == 1 or num_replicas == 1
        if tp_size * num_query_heads != total_query_heads or rest or not shared:
            raise RuntimeError(
                "a KV policy needs attention heads shared out evenly among ranks; "
                f"{tp_size} ranks hold {num_query_heads} query heads and "
                f"{num_kv_heads} KV heads each, the model has {total_query_heads} "
                f"and {total_kv_heads}"
            )
        return cls(
            first_query_head=tp_rank * num_query_heads,
            first_kv_head=tp_rank // num_replicas * num_kv_heads,
            num_replicas=num_replicas,
        )


class ReplicaGroup:
    """The ranks that hold the same KV heads as this one.

    A rank's scores stay its own, sums over its own query heads: what replicas add up
    is a copy made for one selection. So nothing is ever counted twice, and adding up
    again later is right whatever happened in between.

    Args:
        group: process group of the replicas, in the order of their ranks.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self._size = dist.get_world_size(group)

    @classmethod
    def create(cls, num_replicas: int) -> ReplicaGroup:
        """Form the groups; every process of the world must call this at once.

        Args:
            num_replicas: ranks that hold the same KV heads, at least 2. They are
                neighbours: tensor parallelism is vLLM's innermost dimension.
        """
        world = range(dist.get_world_size())
        groups = [list(world[i : i + num_replicas]) for i in world[::num_replicas]]
        group, _ = dist.new_subgroups_by_enumeration(groups)
        return cls(group)

    def total(self, score: torch.Tensor) -> torch.Tensor:
        """The sum of all replicas' scores, the same bits on each of them.

        Args:
            score: float32, of the same shape on every replica; not mutated.
        """
        score = score.contiguous()
        parts = [torch.empty_like(score) for _ in range(self._size)]
        dist.all_gather(parts, score, group=self.group)
        # In the order of ranks: an all-reduce promises no order.
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def selection(
        self,
        score: torch.Tensor,
        position: torch.Tensor,
        block_rows: list[list[int]],
    ) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
        """What to select from, so that each replica keeps the same tokens.

        Args:
            score: float32 ``[num_layers, num_blocks, num_kv_heads, block_size]``.
            position: int32, same shape.
            block_rows: per request, its blocks.

        Returns:
            Copies of score and position with the requests' blocks only, the score
            summed over the replicas; and per request, its blocks in these.
        """
        blocks = torch.tensor(
            [block for row in block_rows for block in row], device=score.device
        )
        numbers = iter(range(len(blocks)))
        return (
            self.total(score.index_select(1, blocks)),
            position.index_select(1, blocks),
            [[next(numbers) for _ in row] for row in block_rows],
        )


class RankCheck:
    """Debug mode ``check_ranks``: asserts that all ranks of a group agree.

    Args:
        group: process group that objects can be gathered in.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._size = dist.get_world_size(group)

    def compare(self, what: str, mine: Any) -> None:
        """Compare a value with the other ranks'; each of them must call this.

        Args:
            what: what is compared, for the message.
            mine: this rank's value.

        Raises:
            RuntimeError: on every rank, when two of them differ.
        """
        found: list[Any] = [None] * self._size
        dist.all_gather_object(found, mine, group=self._group)
        for rank, value in enumerate(found):
            if value != found[0]:
                raise RuntimeError(
                    f"ranks disagree on {what}: rank 0 has {found[0]}, "
                    f"rank {rank} has {value}"
                )


def check_worker(vllm_config: Any, rank: int) -> None:
    """Refuse to start a worker whose installation is not the front end's.

    Ranks may run on other nodes, with another environment.

    Args:
        vllm_config: vLLM's configuration, as the front end sent it.
        rank: the worker's rank.

    Raises:
        KVPolicyError: naming the rank, its node and what is different there.
    """
    where = f"worker rank {rank} on node {socket.gethostname()}"
    if not engine_args.is_installed():
        listed = compat.vllm_envs.VLLM_PLUGINS
        raise KVPolicyError(
            "VLLM_PLUGINS",
            f"{where} did not load the plugin keyformer, which the front end did; "
            f"VLLM_PLUGINS={','.join(listed or ())!r} there must list it or be unset",
        )
    expected = vllm_config.additional_config.get(VERSION_KEY)
    if expected != __version__:
        raise KVPolicyError(
            VERSION_KEY,
            f"{where} has keyformer-vllm {__version__}, the front end {expected}; "
            "install the same version on every node",
        )
