# SPDX-License-Identifier: Apache-2.0
"""What a throughput run serves: presets by name, and the points of their grids."""

from __future__ import annotations

from dataclasses import dataclass

from served_arm import STOCK

ALL = "all"
"""A pool that holds every request in full."""

_BUDGETS = ("keyformer:0.5", "keyformer:0.25")


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
    """

    question: str
    requests: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    pools: tuple[int | str, ...]
    arms: tuple[str, ...] = ("off", *_BUDGETS)


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
}


@dataclass(frozen=True)
class Point:
    """One workload on one pool; all arms are measured there.

    Args:
        requests: how many are queued.
        prompt_len, new_tokens: of each request.
        pool: full sequences that the pool holds.
    """

    requests: int
    prompt_len: int
    new_tokens: int
    pool: int

    def blocks_per_request(self, block_size: int) -> int:
        """Blocks of a full sequence."""
        return -(-(self.prompt_len + self.new_tokens) // block_size)

    def num_blocks(self, block_size: int) -> int:
        """Blocks to ask for: those of the full sequences and vLLM's null block."""
        return self.pool * self.blocks_per_request(block_size) + 1

    @property
    def total_tokens(self) -> int:
        return self.requests * (self.prompt_len + self.new_tokens)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests of {self.prompt_len} + {self.new_tokens} "
            f"tokens, pool of {self.pool} full sequences"
        )
