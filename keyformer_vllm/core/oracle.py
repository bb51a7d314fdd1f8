# SPDX-License-Identifier: Apache-2.0
"""The golden model: a dense, one-request Keyformer loop, written to be read.

One `OracleLayer` stands for the attention of one layer. It is fed rotated queries,
keys and values, holds the retained tokens of each KV head in plain tensors, and drops
evicted ones for good. Everything faster in this package is tested against it.

    append -> attend -> score, and at the head of a due decode step first: evict
"""

from dataclasses import dataclass

import torch

from keyformer_vllm.core import noise
from keyformer_vllm.core.policies import Policy
from keyformer_vllm.core.retention import Eviction, Retention
from keyformer_vllm.core.scoring import (
    attention_logits,
    is_scored,
    score_rows,
    tau_schedule,
)
from keyformer_vllm.core.selection import random_rank, select_kept


@dataclass(frozen=True)
class OracleRequest:
    """What one request asks of every layer.

    Args:
        retention: counts, and the policy. Its `block_size` is the eviction interval:
            1 is the paper, vLLM's block size is what this package serves.
        max_tokens: the most tokens the request may generate; the tau schedule ends
            there.
        noise_key: from `noise.request_noise_key`; NO_NOISE scores without noise.
        tau_init, tau_end: temperature of the score, in the prompt and at the end.
        last_prompt_queries: N of `last:N`; None: all prompt queries score.
        prompt_query_stride: S of `stride:S`; 1: all prompt queries score.
        run_size: 1 selects tokens, 16 whole runs of 16 positions.
        num_prefill_tokens: tokens computed before the first decode step; more than
            the prompt for a request that was preempted and resumed. None: the prompt.
        compact_positions: take an ALiBi bias as if the retained tokens were numbered
            0..m-1 and the query m-1, not from original positions.
        frozen_key_set: reproduce the authors' reference code instead of the paper:
            the token that leaves the recent window is dropped at once instead of
            becoming a candidate, so the key set never changes after the prompt.
            Interval 1 only; k - 1 tokens and the new one are attended.
    """

    retention: Retention
    max_tokens: int
    noise_key: int = noise.NO_NOISE
    tau_init: float = 1.0
    tau_end: float = 2.0
    last_prompt_queries: int | None = None
    prompt_query_stride: int = 1
    run_size: int = 1
    num_prefill_tokens: int | None = None
    compact_positions: bool = False
    frozen_key_set: bool = False

    def __post_init__(self) -> None:
        policy = self.policy
        assert self.prefill_tokens >= self.retention.num_prompt_tokens
        assert not policy.random_rank or self.noise_key != noise.NO_NOISE, policy.name
        if self.frozen_key_set:
            assert self.retention.block_size == 1, "the reference evicts every step"
            assert policy.window is not None, policy.name

    @property
    def policy(self) -> Policy:
        return self.retention.policy

    @property
    def prefill_tokens(self) -> int:
        if self.num_prefill_tokens is None:
            return self.retention.num_prompt_tokens
        return self.num_prefill_tokens


@dataclass(frozen=True)
class KeptSet:
    """The outcome of one eviction in one layer.

    Args:
        num_tokens: tokens computed when it happened (the step's own not included).
        evicted_blocks: intervals' worth of tokens evicted so far.
        position: int64 [num_kv_heads, kv_len], ascending positions retained.
    """

    num_tokens: int
    evicted_blocks: int
    position: torch.Tensor


class OracleLayer:
    """Attention of one layer for one request, with eviction.

    Args:
        request: see `OracleRequest`.
        layer_index: index of the layer in the whole model (keys the noise).
        num_query_heads, num_kv_heads: heads fed to `attend`.
        scale: factor of q . k.
        soft_cap: > 0: logits are bounded to cap * tanh(x / cap).
        first_query_head: index of the first query head in the whole model.
        alibi_slopes: float32 [num_query_heads]: bias by distance, of output and score;
            in original positions unless the request says otherwise. None: none.

    Attributes, for inspection; never mutate them:
        num_tokens: tokens computed so far (logical).
        evicted_blocks: intervals' worth of tokens evicted so far.
        key, value: [num_kv_heads, kv_len, head_size], retained, ascending position.
        position: int64 [num_kv_heads, kv_len].
        score: [num_kv_heads, kv_len], accumulated in the dtype of the inputs.
        history: one `KeptSet` per eviction.
    """

    def __init__(
        self,
        request: OracleRequest,
        layer_index: int,
        num_query_heads: int,
        num_kv_heads: int,
        scale: float,
        soft_cap: float = 0.0,
        first_query_head: int = 0,
        alibi_slopes: torch.Tensor | None = None,
    ) -> None:
        assert num_query_heads % num_kv_heads == 0, (num_query_heads, num_kv_heads)
        self.request = request
        self.layer_index = layer_index
        self.num_query_heads = num_query_heads
        self.num_kv_heads = num_kv_heads
        self.scale = scale
        self.soft_cap = soft_cap
        self.first_query_head = first_query_head
        self.alibi_slopes = alibi_slopes
        self.num_tokens = 0
        self.evicted_blocks = 0
        self.key = torch.empty(0)
        self.value = torch.empty(0)
        self.position = torch.empty(num_kv_heads, 0, dtype=torch.int64)
        self.score = torch.empty(0)
        self.history: list[KeptSet] = []

    @property
    def kv_len(self) -> int:
        return int(self.position.shape[1])

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Process the next tokens of the request, as one model step would.

        The prompt may come in chunks of any size; after it, one token per call.

        Args:
            query: float32 or float64 [num_query_heads, num_new_tokens, head_size],
                after RoPE.
            key, value: same dtype, [num_kv_heads, num_new_tokens, head_size].

        Returns:
            [num_query_heads, num_new_tokens, head_size]: plain softmax attention over
            the retained tokens, without noise or tau.
        """
        num_new = query.shape[1]
        assert query.shape[0] == self.num_query_heads, query.shape
        assert key.shape[:2] == value.shape[:2] == (self.num_kv_heads, num_new)
        if self.num_tokens < self.request.prefill_tokens:
            assert self.num_tokens + num_new <= self.request.prefill_tokens
        else:
            assert num_new == 1, "one token per decode step"
            self._evict_if_due()
        query_position = self.num_tokens + torch.arange(num_new)
        self._append(key, value, query_position)
        output = self._output(query, query_position)
        self._add_scores(query, query_position)
        return output

    def _append(
        self, key: torch.Tensor, value: torch.Tensor, position: torch.Tensor
    ) -> None:
        if self.num_tokens == 0:
            self.key, self.value = key.clone(), value.clone()
            self.score = key.new_zeros(key.shape[:2])
        else:
            self.key = torch.cat([self.key, key], dim=1)
            self.value = torch.cat([self.value, value], dim=1)
            self.score = torch.cat([self.score, key.new_zeros(key.shape[:2])], dim=1)
        new_position = position.expand(self.num_kv_heads, -1)
        self.position = torch.cat([self.position, new_position], dim=1)
        self.num_tokens += len(position)

    def _output(
        self, query: torch.Tensor, query_position: torch.Tensor
    ) -> torch.Tensor:
        query_place, key_place = self._places(query_position)
        logits = attention_logits(
            query,
            self.key,
            self.scale,
            self.soft_cap,
            alibi_slopes=self.alibi_slopes,
            query_position=query_place,
            key_position=key_place,
        )
        # The new tokens are the last ones held: row r sees all but those after it.
        num_new, first_new = query.shape[1], self.kv_len - query.shape[1]
        visible = torch.ones(num_new, self.kv_len, dtype=torch.bool).tril(first_new)
        weights = torch.softmax(logits.masked_fill(~visible, -torch.inf), dim=-1)
        grouped = weights.unflatten(0, (self.num_kv_heads, -1)).flatten(1, 2)
        return (grouped @ self.value).unflatten(1, (-1, num_new)).flatten(0, 1)

    def _add_scores(self, query: torch.Tensor, query_position: torch.Tensor) -> None:
        """Score row by row, so that the sums do not depend on how rows are chunked.

        Each row is a product of the same shapes over fresh copies whatever the chunk:
        a matrix product over several rows may round a row differently.
        """
        request, policy = self.request, self.request.policy
        if not policy.scores:
            return
        num_prompt_tokens = request.retention.num_prompt_tokens
        tau = torch.ones(len(query_position))
        if policy.uses_tau:
            tau = tau_schedule(
                query_position,
                num_prompt_tokens,
                request.max_tokens,
                request.tau_init,
                request.tau_end,
            )
        scored = is_scored(
            query_position,
            num_prompt_tokens,
            request.last_prompt_queries,
            request.prompt_query_stride,
        )
        query_place, key_place = self._places(query_position)
        first_new = self.kv_len - len(query_position)
        for row in scored.nonzero().flatten().tolist():
            num_visible = first_new + row + 1
            self.score[:, :num_visible] += score_rows(
                query[:, row : row + 1].clone(),
                self.key[:, :num_visible].clone(),
                query_position[row : row + 1],
                self.position[:, :num_visible],
                tau[row : row + 1],
                noise_key=request.noise_key if policy.uses_noise else noise.NO_NOISE,
                layer_index=self.layer_index,
                first_query_head=self.first_query_head,
                scale=self.scale,
                soft_cap=self.soft_cap,
                alibi_slopes=self.alibi_slopes,
                query_place=query_place[row : row + 1],
                key_place=key_place[:, :num_visible],
            )[:, 0]

    def _places(
        self, query_position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a bias takes distances in, of the newest tokens and of all retained."""
        if not self.request.compact_positions:
            return query_position, self.position
        # Tokens are held in ascending order.
        place = torch.arange(self.kv_len)
        newest = place[self.kv_len - len(query_position) :]
        return newest, place.expand(self.num_kv_heads, -1)

    def _evict_if_due(self) -> None:
        retention = self.request.retention
        eviction = retention.eviction(self.num_tokens, self.evicted_blocks)
        if eviction is None:
            return
        keep = self._select(eviction)
        kept_shape = (self.num_kv_heads, -1)
        self.key = self.key[keep].unflatten(0, kept_shape)
        self.value = self.value[keep].unflatten(0, kept_shape)
        self.score = self.score[keep].unflatten(0, kept_shape)
        self.position = self.position[keep].unflatten(0, kept_shape)
        self.evicted_blocks = eviction.evicted_blocks
        self.history.append(
            KeptSet(self.num_tokens, self.evicted_blocks, self.position)
        )

    def _select(self, eviction: Eviction) -> torch.Tensor:
        """Choose what stays: bool [num_kv_heads, kv_len], equal counts per head."""
        valid, num_keep = None, eviction.kv_len
        if self.request.frozen_key_set:
            # The reference masks one more token than it has scores for: the one at
            # recent_start is neither recent nor a candidate.
            assert eviction.recent_start < self.num_tokens, "needs a recent window"
            valid = self.position != eviction.recent_start
            num_keep -= 1
        keep = select_kept(
            self._rank(),
            self.position,
            num_keep,
            eviction.num_sinks,
            eviction.recent_start,
            run_size=self.request.run_size,
            valid=valid,
        )
        assert (keep.sum(-1) == num_keep).all(), keep.sum(-1)
        return keep

    def _rank(self) -> torch.Tensor:
        if not self.request.policy.random_rank:
            return self.score
        first_kv_head = (
            self.first_query_head * self.num_kv_heads // self.num_query_heads
        )
        kv_head = first_kv_head + torch.arange(self.num_kv_heads)
        return random_rank(
            self.request.noise_key, self.layer_index, kv_head[:, None], self.position
        )
