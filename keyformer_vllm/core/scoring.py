# SPDX-License-Identifier: Apache-2.0
"""What a token is worth: the Keyformer score (arXiv 2403.09054, section 3), dense.

One query row i of one query head gives each visible key j

    p_ij = softmax_j((x_ij + g_ij) / tau_i),   x_ij = scale * q_i . k_j  (soft-capped)

with Gumbel noise g and a temperature tau that rises while the answer is generated.
Where the model has them, an ALiBi bias is part of x, and an attention sink is one more
term of the normaliser, exp(s / tau), that belongs to no key. A KV head's row is the sum
over its query heads, added one by one in ascending order; its score is the sum over the
rows, added one by one in ascending query position.
"""

import torch

from keyformer_vllm.core import noise


def tau_schedule(
    position: torch.Tensor,
    num_prompt_tokens: torch.Tensor | int,
    max_tokens: torch.Tensor | int,
    tau_init: float,
    tau_end: float,
) -> torch.Tensor:
    """Temperature of the query at each position (paper, equation 10).

    `tau_init` inside the prompt; then it moves by (tau_end - tau_init) / max_tokens
    with each generated token, the first included, and stays at `tau_end`.

    Args:
        position: int, any shape: logical positions of the queries.
        num_prompt_tokens, max_tokens: broadcast against `position`; `max_tokens` is
            the most tokens the request may generate (0 counts as 1: rows of a batch
            that belong to no request must not divide by it).
        tau_init, tau_end: positive.

    Returns:
        float32, broadcast shape; computed in float64 and rounded once.
    """
    assert tau_init > 0 and tau_end > 0, (tau_init, tau_end)
    max_tokens = torch.as_tensor(max_tokens, device=position.device).clamp(min=1)
    generated = (position - num_prompt_tokens + 1).clamp(min=0)
    share = torch.minimum(generated, max_tokens).double() / max_tokens
    return (tau_init + share * (tau_end - tau_init)).to(torch.float32)


def is_scored(
    position: torch.Tensor,
    num_prompt_tokens: torch.Tensor | int,
    last_prompt_queries: int | None,
    prompt_query_stride: torch.Tensor | int = 1,
) -> torch.Tensor:
    """Whether the query at each position adds to the scores.

    Args:
        position: int, any shape: logical positions of the queries.
        num_prompt_tokens: broadcasts against `position`.
        last_prompt_queries: N of `last:N`: of the prompt, only the last N queries
            score; None: all do. Generated tokens always do.
        prompt_query_stride: S of `stride:S`: of the prompt, only every S-th query
            scores, counted back from the newest, which always does. Broadcasts against
            `position`; 0 counts as 1, for rows of a batch that belong to no request.

    Returns:
        bool, broadcast shape.
    """
    # How far before the end of the prompt; below 0 for generated tokens.
    before_end = num_prompt_tokens - 1 - position
    stride = torch.as_tensor(prompt_query_stride, device=position.device).clamp(min=1)
    scored = (before_end < 0) | (before_end % stride == 0)
    if last_prompt_queries is not None:
        scored &= before_end < last_prompt_queries
    return scored


def attention_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    *,
    alibi_slopes: torch.Tensor | None = None,
    query_position: torch.Tensor | None = None,
    key_position: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute logits: scaled, soft-capped, then biased.

    Args:
        query: float [num_query_heads, num_rows, head_size], after RoPE.
        key: float [num_kv_heads, num_keys, head_size], after RoPE; query heads
            [h * num_queries_per_kv, (h + 1) * num_queries_per_kv) read KV head h.
        scale: factor of the dot product.
        soft_cap: > 0 bounds logits to cap * tanh(x / cap); 0 does not.
        alibi_slopes: float32 [num_query_heads]; adds slope * (key position - query
            position), after the soft cap. None: no bias, and no positions needed.
        query_position: int [num_rows], logical.
        key_position: int [num_kv_heads, num_keys], logical.

    Returns:
        [num_query_heads, num_rows, num_keys], dtype of the inputs.
    """
    num_kv_heads, num_rows = key.shape[0], query.shape[1]
    assert query.shape[0] % num_kv_heads == 0, (query.shape, key.shape)
    grouped = query.unflatten(0, (num_kv_heads, -1)).flatten(1, 2)
    product = grouped @ key.transpose(-1, -2)
    logits = product.unflatten(1, (-1, num_rows)).flatten(0, 1) * scale
    if soft_cap > 0:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if alibi_slopes is not None:
        assert query_position is not None and key_position is not None
        distance = key_position[:, None, :] - query_position[:, None]
        distance = distance.repeat_interleave(query.shape[0] // num_kv_heads, dim=0)
        slopes = alibi_slopes.to(logits.dtype)[:, None, None]
        logits = logits + slopes * distance.to(logits.dtype)
    return logits


def noisy_softmax(
    logits: torch.Tensor,
    gumbel: torch.Tensor | None,
    tau: torch.Tensor,
    visible: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn logits into the row probabilities that a score sums.

    Args:
        logits: float [..., num_rows, num_keys].
        gumbel: noise of the same shape, any float dtype; None: no noise.
        tau: float [num_rows]; a row with tau <= 0 is not scored and gives zeros.
        visible: bool, broadcasts against `logits`: keys a row may see; None: all.
        sinks: float [...], one logit per row's head that takes part in the softmax
            without noise, as a key that has no column; None: none.

    Returns:
        [..., num_rows, num_keys], dtype of `logits`; a row sums to 1 (less, with a
        sink), or to 0 if it is not scored or sees no key.
    """
    noisy = logits if gumbel is None else logits + gumbel.to(logits.dtype)
    scored = (tau > 0)[:, None]
    divisor = torch.where(scored, tau.to(logits.dtype)[:, None], 1.0)
    noisy = noisy / divisor
    if visible is not None:
        noisy = noisy.masked_fill(~visible, -torch.inf)
        # A row that sees nothing would be 0 / 0.
        scored = scored & visible.any(-1, keepdim=True)
    if sinks is not None:
        column = (sinks.to(logits.dtype)[..., None, None] / divisor).expand(
            *noisy.shape[:-1], 1
        )
        noisy = torch.cat([noisy, column], dim=-1)
    probability = torch.softmax(noisy, dim=-1)[..., : logits.shape[-1]]
    return probability.masked_fill(~scored, 0.0)


def sum_query_heads(probability: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Add the rows of the query heads that share a KV head, in ascending order.

    Args:
        probability: float [num_query_heads, num_rows, num_keys].

    Returns:
        [num_kv_heads, num_rows, num_keys].
    """
    grouped = probability.unflatten(0, (num_kv_heads, -1))
    total = grouped[:, 0].clone()
    for query_head in range(1, grouped.shape[1]):
        total += grouped[:, query_head]
    return total


def score_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    query_position: torch.Tensor,
    key_position: torch.Tensor,
    tau: torch.Tensor,
    visible: torch.Tensor | None = None,
    *,
    noise_key: int,
    layer_index: int,
    first_query_head: int,
    scale: float,
    soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    query_place: torch.Tensor | None = None,
    key_place: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute what each query row adds to the score of each key.

    Args:
        query: float [num_query_heads, num_rows, head_size].
        key: float [num_kv_heads, num_keys, head_size].
        query_position: int [num_rows], logical.
        key_position: int [num_kv_heads, num_keys], logical: KV heads may hold
            different tokens.
        tau: float32 [num_rows]; rows with tau <= 0 add nothing.
        visible: bool [num_rows, num_keys] or broadcastable; None: all.
        noise_key: of the request; `noise.NO_NOISE` for none.
        layer_index: index of the layer in the whole model.
        first_query_head: index of query[0] in the whole model.
        scale, soft_cap: see `attention_logits`.
        alibi_slopes, sinks: float32 [num_query_heads], see `attention_logits` and
            `noisy_softmax`; None: the model has none.
        query_place, key_place: int, shapes of the positions: what the bias is taken
            from in their stead, as if tokens were renumbered. None: the positions.

    Returns:
        [num_kv_heads, num_rows, num_keys], dtype of `query`; mutates nothing.
    """
    num_query_heads, num_kv_heads = query.shape[0], key.shape[0]
    logits = attention_logits(
        query,
        key,
        scale,
        soft_cap,
        alibi_slopes=alibi_slopes,
        query_position=query_position if query_place is None else query_place,
        key_position=key_position if key_place is None else key_place,
    )
    gumbel = None
    if noise_key != noise.NO_NOISE:
        query_head = first_query_head + torch.arange(num_query_heads)
        rows = noise.row_keys(
            noise_key,
            layer_index,
            query_head[:, None, None],
            query_position[:, None],
        )
        per_query_head = key_position.repeat_interleave(
            num_query_heads // num_kv_heads, dim=0
        )
        gumbel = noise.gumbel(rows, per_query_head[:, None, :])
    probability = noisy_softmax(logits, gumbel, tau, visible, sinks)
    return sum_query_heads(probability, num_kv_heads)
