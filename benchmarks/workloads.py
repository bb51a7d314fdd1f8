# SPDX-License-Identifier: Apache-2.0
"""What a throughput run serves: presets by name, and the points of their grids."""

from __future__ import annotations

from dataclasses import dataclass

from served_arm import STOCK

ALL = "all"
"""A pool that holds every request in full."""

_BUDGETS = ("keyformer:0.5", "keyformer:0.25")


@dataclass(frozen=True)
class OnGpu:
    """What a preset changes for a GPU and a model with random weights.

    Args:
        max_num_seqs: requests that may run at once; None: all.
        pool_tokens: tokens that the pool holds; None: as `pools` says.
    """

    max_num_seqs: int | None = None
    pool_tokens: int | None = None
    block_size: int = 16
    max_batched_tokens: int = 8192


@dataclass(frozen=True)
class Preset:
    """Settings under one name; lists span a grid.

    Args:
        question: what it answers.
        requests: how many are queued, one or more numbers.
        prompt_lens: tokens of each prompt.
        new_tokens: tokens that each request generates, one or more numbers.
        pools: full sequences that the pool holds, or `all`.
        arms: the first is what the others are compared with.
        gpu: settings that are not those of a CPU; None: the preset is for one.
    """

    question: str
    requests: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    pools: tuple[int | str, ...]
    arms: tuple[str, ...] = ("off", *_BUDGETS)
    gpu: OnGpu | None = None


PRESETS = {
    "off": Preset(
        question="what a plugin without a policy and a budget of 1.0 cost",
        requests=(4,),
        prompt_lens=(1024,),
        new_tokens=(128,),
        pools=(ALL,),
        arms=(STOCK, "off", "keyformer:1.0"),
    ),
    "ample": Preset(
        question="long prompts and room for all of them",
        requests=(8,),
        prompt_lens=(4096,),
        new_tokens=(128,),
        pools=(ALL,),
    ),
    "tight": Preset(
        question="six times as many requests as the pool holds in full",
        requests=(24,),
        prompt_lens=(2048,),
        new_tokens=(512,),
        pools=(4,),
    ),
    "prefill-bound": Preset(
        question="the same pool, but hardly anything to decode",
        requests=(24,),
        prompt_lens=(2048,),
        new_tokens=(64,),
        pools=(4,),
    ),
    "admission": Preset(
        question="whether freed blocks let more requests run; small and fast",
        requests=(16,),
        prompt_lens=(512,),
        new_tokens=(128,),
        pools=(4,),
        arms=("off", "keyformer:0.5"),
    ),
    "crossover": Preset(
        question="from ample to tight, long and short answers: where the gain begins",
        requests=(16,),
        prompt_lens=(2048,),
        new_tokens=(512, 64),
        pools=(ALL, 12, 8, 6, 4, 2),
    ),
    "gpu-ample": Preset(
        question="room for all, an 8B model on a GPU: is a decode step shorter",
        requests=(64,),
        prompt_lens=(2048,),
        new_tokens=(128,),
        pools=(ALL,),
        arms=(STOCK, "keyformer:1.0", "keyformer:0.5"),
        gpu=OnGpu(),
    ),
    "gpu-tight": Preset(
        question="a pool of 150,000 tokens for 590,000, an 8B model on a GPU",
        requests=(192,),
        prompt_lens=(2048,),
        new_tokens=(1024,),
        pools=(ALL,),
        arms=(STOCK, *_BUDGETS),
        gpu=OnGpu(max_num_seqs=256, pool_tokens=150_000),
    ),
    "gpu-prefill-bound": Preset(
        question="long prompts and short answers, an 8B model on a GPU",
        requests=(64,),
        prompt_lens=(4096,),
        new_tokens=(256,),
        pools=(ALL,),
        arms=(STOCK, "keyformer:0.5", "keyformer:0.5:score_queries=stride:4"),
        gpu=OnGpu(pool_tokens=150_000),
    ),
}


@dataclass(frozen=True)
class Point:
    """One workload on one pool; all arms are measured there.

    Args:
        requests: how many are queued.
        prompt_len, new_tokens: of each request.
        pool: full sequences that the pool holds.
        pool_tokens: tokens that it holds, where it is given so.
    """

    requests: int
    prompt_len: int
    new_tokens: int
    pool: int
    pool_tokens: int | None = None

    def blocks_per_request(self, block_size: int) -> int:
        """Blocks of a full sequence."""
        return -(-(self.prompt_len + self.new_tokens) // block_size)

    def num_blocks(self, block_size: int) -> int:
        """Blocks to ask for: those of the pool and vLLM's null block."""
        if self.pool_tokens is not None:
            return self.pool_tokens // block_size + 1
        return self.pool * self.blocks_per_request(block_size) + 1

    @property
    def total_tokens(self) -> int:
        return self.requests * (self.prompt_len + self.new_tokens)

    def __str__(self) -> str:
        pool = f"{self.pool} full sequences"
        if self.pool_tokens is not None:
            pool = f"{self.pool_tokens} tokens"
        return (
            f"{self.requests} requests of {self.prompt_len} + {self.new_tokens} "
            f"tokens, pool of {pool}"
        )
