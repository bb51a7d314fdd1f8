# SPDX-License-Identifier: Apache-2.0
"""How many requests a pool of blocks keeps running: exact integers, no torch.

A request is admitted when the blocks of its whole prompt are free, and while it decodes
it holds fewer. So r requests run where r - 1 of them leave room for one more prompt:

    [ held | held | ... | held |   prompt   | free )    num_blocks
      \\_____ r - 1 of them ____/  the newest
"""

from dataclasses import dataclass

from keyformer_vllm.core.retention import Retention


@dataclass(frozen=True)
class Capacity:
    """Blocks that requests of one length hold, and how many of them run.

    Args:
        budget_tokens: the budget k at the end of the request.
        prompt_blocks: blocks of the whole prompt.
        held_blocks: the most blocks held while decoding.
        full_blocks: the most held without eviction, which is at the end.
        running: requests that run at once in the steady state, with this policy; 0
            where not even one fits.
        running_without_eviction: the same for stock vLLM. It admits more, because it
            admits by the prompt alone; then it has to preempt as they grow.
    """

    budget_tokens: int
    prompt_blocks: int
    held_blocks: int
    full_blocks: int
    running: int
    running_without_eviction: int


def estimate_capacity(
    retention: Retention,
    *,
    num_new_tokens: int,
    num_blocks: int,
    watermark_blocks: int = 0,
) -> Capacity:
    """Estimate steady-state concurrency for requests that are all alike.

    It is reached where requests arrive faster than they finish and `max_num_seqs` does
    not cap it. Where k is a multiple of the block size, that many fit even if each
    holds the most it ever holds; else blocks held rise by one between two evictions,
    the mean is counted, and requests that rise together may push one another out.

    Args:
        retention: of one such request; has its prompt and block size.
        num_new_tokens: tokens that each generates, at least 1.
        num_blocks: blocks of the pool, vLLM's null block not counted.
        watermark_blocks: blocks that vLLM leaves free when it admits a request beside
            running ones (`vllm/v1/core/kv_cache_manager.py`, `allocate_slots`, which
            also holds the check on the whole prompt).
    """
    assert num_new_tokens >= 1 and num_blocks >= 0, (num_new_tokens, num_blocks)
    block_size, prompt = retention.block_size, retention.num_prompt_tokens
    # The last token is sampled and never written.
    total = prompt + num_new_tokens - 1
    prompt_blocks = -(-prompt // block_size)
    held_blocks = full_blocks = -(-total // block_size)
    running = running_without_eviction = num_blocks // full_blocks
    if not retention.never_evicts(total - 1):
        held_blocks = -(-retention.max_kv_len(total) // block_size)
        # Between two evictions a request holds (k + 1) to (k + block_size) tokens, each
        # for one step: in blocks that is (k + block_size) / block_size on average. A
        # budget that grows with the sequence is taken halfway.
        mean_tokens = retention.max_kv_len((prompt + total) // 2)
        beside = max(0, num_blocks - prompt_blocks - watermark_blocks)
        running = min(
            1 + beside * block_size // mean_tokens,
            num_blocks * block_size // mean_tokens,
        )
        if num_blocks < max(prompt_blocks, held_blocks):
            running = 0
    return Capacity(
        budget_tokens=retention.budget_tokens(total),
        prompt_blocks=prompt_blocks,
        held_blocks=held_blocks,
        full_blocks=full_blocks,
        running=running,
        running_without_eviction=running_without_eviction,
    )
