# SPDX-License-Identifier: Apache-2.0
"""Which tokens stay: sinks, the recent window, and the best-ranked of the rest."""

import torch

from keyformer_vllm.core import noise

RUN_SIZE = 16
"""Positions per run when whole blocks are selected; not the KV cache's block size."""

# Ranks of a token, the first to be retained first.
_ALWAYS, _CANDIDATE, _ABSENT = 0, 1, 2


def select_kept(
    score: torch.Tensor,
    position: torch.Tensor,
    num_keep: torch.Tensor | int,
    num_sinks: torch.Tensor | int,
    recent_start: torch.Tensor | int,
    *,
    run_size: int = 1,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose the tokens each KV head retains.

    Kept are the tokens at positions < `num_sinks` or >= `recent_start`, and of the
    rest (the candidates) the best-scored, so that exactly `num_keep` remain. Of equal
    scores the lower position stays. A NaN score ranks below every number.

    With `run_size` > 1, candidates are taken by whole runs of positions
    [run_size * i, run_size * (i + 1)), ranked by the sum of their candidates' scores
    (in float64, one by one in ascending position); of equal sums, the lower run stays.
    Of the last run taken, as many as still fit stay, lower positions first.

    Args:
        score: float [..., kv_len]; for a random choice, `random_rank`.
        position: int [..., kv_len], distinct within a row, any order.
        num_keep, num_sinks, recent_start: int, or int tensors [...] (leading shape).
        run_size: 1 selects single tokens, `RUN_SIZE` runs.
        valid: bool [..., kv_len]; False marks padding that is not a token. None: all
            are tokens.

    Returns:
        bool [..., kv_len], True for retained tokens; mutates nothing.
    """
    position = position.to(torch.int64)
    if valid is None:
        valid = torch.ones_like(position, dtype=torch.bool)
    num_keep, num_sinks, recent_start = (
        torch.as_tensor(count, device=score.device)[..., None]
        for count in (num_keep, num_sinks, recent_start)
    )
    always = (position < num_sinks) | (position >= recent_start)
    rank_class = torch.where(always, _ALWAYS, _CANDIDATE)
    rank_class = torch.where(valid, rank_class, _ABSENT)
    num_always = (rank_class == _ALWAYS).sum(-1, keepdim=True)
    assert (num_always <= num_keep).all(), "sinks and window exceed the retained count"
    assert (valid.sum(-1, keepdim=True) >= num_keep).all(), "fewer tokens than to keep"

    if run_size > 1:
        score = _run_score(score, position, rank_class == _CANDIDATE, run_size)
    # Stable sorts from the least to the most significant key.
    order = position.argsort(dim=-1, stable=True)
    is_nan = score.isnan()
    order = _resort(order, score.masked_fill(is_nan, -torch.inf), descending=True)
    order = _resort(order, is_nan.to(torch.int8))
    order = _resort(order, rank_class)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return rank < num_keep


def random_rank(
    noise_key: torch.Tensor | int,
    layer: torch.Tensor | int,
    kv_head: torch.Tensor | int,
    position: torch.Tensor,
) -> torch.Tensor:
    """Rank tokens at random: a function of the key and the position only.

    So a token keeps its rank from one eviction to the next, whatever the batch.

    Args:
        noise_key: int64, from `noise.request_noise_key`.
        layer: index of the layer in the whole model.
        kv_head: index of the KV head in the whole model, whatever the rank.
        position: int [...]; the other arguments broadcast against it.

    Returns:
        float32, uniform in (0, 1), to be passed to `select_kept` as score.
    """
    rows = noise.row_keys(noise_key, layer, kv_head, position)
    return noise.uniform(rows, position)


def _resort(
    order: torch.Tensor, key: torch.Tensor, descending: bool = False
) -> torch.Tensor:
    """Sort `order` (indices into the last axis) by `key`, keeping ties in order."""
    by_key = key.gather(-1, order).argsort(dim=-1, stable=True, descending=descending)
    return order.gather(-1, by_key)


def _run_score(
    score: torch.Tensor, position: torch.Tensor, candidate: torch.Tensor, run_size: int
) -> torch.Tensor:
    """Replace each token's score by the sum over the candidates of its run."""
    # Padding may hold any position: park it at 0, where it adds nothing.
    position = position.masked_fill(~candidate, 0)
    num_runs = int(position.max()) // run_size + 1
    score = score.double().masked_fill(~candidate, 0.0)
    by_position = score.new_zeros(*score.shape[:-1], num_runs * run_size)
    by_position.scatter_add_(-1, position, score)
    by_run = by_position.unflatten(-1, (num_runs, run_size))
    total = by_run[..., 0].clone()
    for column in range(1, run_size):  # a fixed order of addition
        total += by_run[..., column]
    return total.gather(-1, position // run_size)
