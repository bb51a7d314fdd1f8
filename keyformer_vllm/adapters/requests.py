# SPDX-License-Identifier: Apache-2.0
"""From a request's settings to the integers that the scheduler and workers use."""

from __future__ import annotations

from typing import Any

from keyformer_vllm.adapters.plan import RequestParams
from keyformer_vllm.config import KeyformerConfig
from keyformer_vllm.core.noise import NO_NOISE, request_noise_key
from keyformer_vllm.core.policies import get_policy
from keyformer_vllm.core.retention import Retention
from keyformer_vllm.core.selection import RUN_SIZE


def resolve_request(
    server: KeyformerConfig, request: Any, block_size: int
) -> tuple[KeyformerConfig, Retention, RequestParams]:
    """Settings of one request, and the same as integers.

    Args:
        server: the server's policy.
        request: vLLM's ``Request``; its ``vllm_xargs`` were checked on arrival.
        block_size: tokens per KV cache block.

    Raises:
        KVPolicyError: for request settings that the front end let through.
    """
    sampling = request.sampling_params
    config = server.with_request(sampling.extra_args)
    policy = get_policy(config.policy)
    num_prompt_tokens = request.num_prompt_tokens
    retention = config.retention(num_prompt_tokens, block_size)
    # Evictions come at the head of a step after the prompt. The last step starts
    # with this many tokens: one more is written in it, and one only sampled.
    at_last_head = num_prompt_tokens + request.max_tokens - 2
    tracked = request.max_tokens > 1 and not retention.never_evicts(at_last_head)
    noisy = policy.uses_noise and config.noise == "gumbel"
    keyed = noisy or policy.random_rank
    last_queries = config.num_score_queries
    params = RequestParams(
        tracked=tracked,
        scores=tracked and policy.scores,
        noise_key=(
            request_noise_key(config.seed, sampling.seed or 0) if keyed else NO_NOISE
        ),
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max(1, request.max_tokens),
        first_scored=(
            0 if last_queries is None else max(0, num_prompt_tokens - last_queries)
        ),
        query_stride=config.score_query_stride,
        uses_tau=policy.uses_tau,
        run_size=RUN_SIZE if config.select == "block" else 1,
        random=policy.random_rank,
    )
    return config, retention, params
