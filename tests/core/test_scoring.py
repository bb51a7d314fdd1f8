# SPDX-License-Identifier: Apache-2.0
"""Scores against the documented formula, written out in NumPy with its own noise."""

import numpy as np
import pytest
import torch

from keyformer_vllm.core import noise, scoring
from keyformer_vllm.core.oracle import OracleLayer, OracleRequest
from keyformer_vllm.core.policies import get_policy
from keyformer_vllm.core.retention import Retention
from keyformer_vllm.core.selection import select_kept


def numpy_gumbel(key: int, layer: int, head: int, query: int, keys: int) -> np.ndarray:
    """Noise of one row over key positions [0, keys), in uint32 and float64."""

    def mix(x: int) -> int:
        x = np.uint64(x & 0xFFFFFFFF)
        x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & mask
        x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & mask
        return int(x ^ (x >> np.uint64(16)))

    mask = np.uint64(0xFFFFFFFF)
    low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    a = mix(mix(mix(mix(low ^ 0x243F6A88) + layer) ^ head) + query)
    b = mix(mix(mix(mix(high ^ 0x85A308D3) ^ layer) + head) ^ query)
    j = np.arange(keys, dtype=np.uint32)
    x = np.uint32(a) + j * np.uint32(0x9E3779B9)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = x ^ np.uint32(b)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    r = (x ^ (x >> np.uint32(16))) >> np.uint32(9)
    u = (2.0 * r + 1.0) / 2**24
    return -np.log(-np.log(u))


def numpy_scores(query, key, case) -> np.ndarray:
    """f_j = sum over heads and rows i of softmax_j((x_ij + g_ij) / tau_i)."""
    num_query_heads, num_tokens, _ = query.shape
    num_kv_heads = key.shape[0]
    score = np.zeros((num_kv_heads, num_tokens))
    for i in range(num_tokens):
        t = i - case["num_prompt_tokens"] + 1
        if case["last"] is not None and t <= -case["last"]:
            continue
        tau = case["tau_init"]
        if t > 0:
            step = (case["tau_end"] - case["tau_init"]) / case["max_tokens"]
            tau += min(t, case["max_tokens"]) * step
        for head in range(num_query_heads):
            kv_head = head // (num_query_heads // num_kv_heads)
            x = case["scale"] * key[kv_head, : i + 1] @ query[head, i]
            if case["soft_cap"]:
                x = case["soft_cap"] * np.tanh(x / case["soft_cap"])
            if case["noise_key"]:
                x = x + numpy_gumbel(
                    case["noise_key"],
                    case["layer_index"],
                    case["first_query_head"] + head,
                    i,
                    i + 1,
                )
            weight = np.exp((x - x.max()) / tau)
            score[kv_head, : i + 1] += weight / weight.sum()
    return score


def random_case(seed: int):
    rng = np.random.default_rng(seed)
    num_prompt_tokens, generated = rng.integers(1, 14), rng.integers(0, 7)
    num_kv_heads, num_queries_per_kv = rng.integers(1, 4), rng.integers(1, 4)
    head_size = int(rng.integers(3, 9))
    case = {
        "num_prompt_tokens": int(num_prompt_tokens),
        "max_tokens": int(rng.integers(1, 9)),
        "tau_init": float(rng.choice([0.5, 1.0])),
        "tau_end": float(rng.choice([1.0, 2.0])),
        "last": None if rng.random() < 0.6 else int(rng.integers(1, 6)),
        "scale": head_size**-0.5,
        "soft_cap": float(rng.choice([0.0, 1.5])),
        "noise_key": 0
        if rng.random() < 0.25
        else noise.request_noise_key(seed, int(rng.integers(0, 2**31))),
        "layer_index": int(rng.integers(0, 40)),
        "first_query_head": int(rng.integers(0, 3) * num_queries_per_kv),
    }
    tokens = num_prompt_tokens + generated
    query = rng.normal(size=(num_kv_heads * num_queries_per_kv, tokens, head_size)) * 2
    key = rng.normal(size=(num_kv_heads, tokens, head_size)) * 2
    return case, query.astype(np.float32), key.astype(np.float32)


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_scores_equal_the_formula_in_numpy(first_seed):
    """Case A23 on 200 random cases: equal to 1e-5, and so is what they select."""
    for seed in range(first_seed, first_seed + 50):
        case, query, key = random_case(seed)
        retention = Retention.resolve(
            get_policy("keyformer"),
            num_prompt_tokens=case["num_prompt_tokens"],
            block_size=16,
            budget=1.0,
        )
        request = OracleRequest(
            retention,
            max_tokens=case["max_tokens"],
            noise_key=case["noise_key"],
            tau_init=case["tau_init"],
            tau_end=case["tau_end"],
            last_prompt_queries=case["last"],
        )
        layer = OracleLayer(
            request,
            case["layer_index"],
            query.shape[0],
            key.shape[0],
            case["scale"],
            case["soft_cap"],
            case["first_query_head"],
        )
        q, k = torch.from_numpy(query), torch.from_numpy(key)
        prompt = case["num_prompt_tokens"]
        layer.attend(q[:, :prompt], k[:, :prompt], k[:, :prompt])
        for i in range(prompt, q.shape[1]):
            layer.attend(q[:, i : i + 1], k[:, i : i + 1], k[:, i : i + 1])
        expected = numpy_scores(query.astype(np.float64), key.astype(np.float64), case)
        assert np.abs(layer.score.numpy() - expected).max() < 1e-5, seed
        num_keep = (k.shape[1] + 1) // 2
        kept, should = (
            select_kept(score, layer.position, num_keep, 0, k.shape[1])
            for score in (layer.score.double(), torch.from_numpy(expected))
        )
        for head in (kept != should).any(-1).nonzero().flatten().tolist():
            # Only a tie within the tolerance may be broken the other way.
            contested = expected[head][(kept != should)[head].numpy()]
            assert np.ptp(contested) < 2e-5, seed


def test_tau_schedule():
    position = torch.tensor([0, 9, 10, 11, 12, 13, 14, 200])
    tau = scoring.tau_schedule(position, 10, 4, 1.0, 2.0)
    expected = torch.tensor([1.0, 1.0, 1.25, 1.5, 1.75, 2.0, 2.0, 2.0])
    assert torch.equal(tau, expected) and tau.dtype == torch.float32
    falling = scoring.tau_schedule(position, 10, 2, 2.0, 1.0)
    assert falling.tolist() == [2.0, 2.0, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    per_request = scoring.tau_schedule(
        torch.tensor([10, 10]), torch.tensor([11, 10]), torch.tensor([5, 2]), 1.0, 2.0
    )
    assert per_request.tolist() == [1.0, 1.5]
    assert scoring.tau_schedule(position[2:3], 10, 0, 1.0, 2.0).tolist() == [2.0]
    with pytest.raises(AssertionError):
        scoring.tau_schedule(position, 10, 4, 1.0, 0.0)


def test_is_scored():
    position = torch.arange(8)
    assert scoring.is_scored(position, 5, None).all()
    assert scoring.is_scored(position, 5, 2).tolist() == [False] * 3 + [True] * 5
    assert scoring.is_scored(position, 5, 100).all()


def test_unscored_and_blind_rows_are_zero():
    logits = torch.randn(2, 3, 4)
    visible = torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]])
    tau = torch.tensor([0.0, 1.0, 2.0])
    p = scoring.noisy_softmax(logits, None, tau, visible)
    assert (p[:, :2] == 0).all() and (p[:, 2, 1::2] == 0).all()
    expected = torch.softmax(logits[:, 2, ::2] / 2, -1)
    assert torch.allclose(p[:, 2, ::2], expected)


def test_noise_is_added_before_dividing_by_tau():
    logits, gumbel = torch.randn(1, 2, 5), torch.randn(1, 2, 5)
    p = scoring.noisy_softmax(logits, gumbel, torch.tensor([2.0, 2.0]))
    assert torch.allclose(p, torch.softmax((logits + gumbel) / 2, -1))


def test_at_tau_one_noise_is_a_division_by_an_exponential():
    """exp(x + g) = exp(x) / E: what the operators compute."""
    rows = noise.row_keys(noise.request_noise_key(0, 0), 0, 0, torch.arange(4)[:, None])
    position = torch.arange(50)
    logits = torch.randn(1, 4, 50, generator=torch.Generator().manual_seed(0))
    p = scoring.noisy_softmax(logits, noise.gumbel(rows, position), torch.ones(4))
    weight = logits.exp() / noise.exponential(rows, position)
    assert torch.allclose(p, weight / weight.sum(-1, keepdim=True), atol=1e-6)


def test_which_queries_score():
    position = torch.arange(12)  # a prompt of 8, then 4 generated tokens

    def scored(*args):
        return scoring.is_scored(position, 8, *args).nonzero().flatten().tolist()

    assert scored(None) == scored(None, 1) == scored(99) == list(range(12))
    assert scored(3) == [5, 6, 7, 8, 9, 10, 11]
    assert scored(None, 3) == [1, 4, 7, 8, 9, 10, 11]
    assert scored(None, 100) == [7, 8, 9, 10, 11]
    # A row that belongs to no request has 0 everywhere and must not divide by it.
    assert scoring.is_scored(
        position, 0, None, torch.zeros(12, dtype=torch.int64)
    ).all()


def test_logits_share_kv_heads_and_soft_cap():
    query, key = torch.randn(6, 3, 8), torch.randn(2, 5, 8)
    logits = scoring.attention_logits(query, key, 0.25)
    for head in range(6):
        expected = 0.25 * query[head] @ key[head // 3].T
        assert torch.allclose(logits[head], expected, atol=1e-5)
    capped = scoring.attention_logits(query, key, 0.25, 2.0)
    assert torch.allclose(capped, 2 * torch.tanh(logits / 2), atol=1e-5)


def test_bias_is_added_after_the_soft_cap():
    query, key = torch.randn(4, 2, 8), torch.randn(2, 3, 8)
    slopes = torch.tensor([0.5, 0.25, 2.0, -1.0])
    query_position = torch.tensor([20, 21])
    key_position = torch.tensor([[0, 5, 20], [3, 4, 21]])
    biased = scoring.attention_logits(
        query,
        key,
        0.25,
        2.0,
        alibi_slopes=slopes,
        query_position=query_position,
        key_position=key_position,
    )
    capped = scoring.attention_logits(query, key, 0.25, 2.0)
    for head in range(4):
        distance = key_position[head // 2] - query_position[:, None]
        expected = capped[head] + slopes[head] * distance
        assert torch.allclose(biased[head], expected, atol=1e-5)


def test_a_sink_is_one_more_key_without_a_column():
    logits, gumbel = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    sinks, tau = torch.tensor([0.3, -2.0]), torch.tensor([1.0, 0.0, 2.0])
    visible = torch.tensor([True, True, False, True, True])
    p = scoring.noisy_softmax(logits, gumbel, tau, visible, sinks)
    for head in range(2):
        for row in (0, 2):
            x = (logits + gumbel)[head, row, visible]
            x = torch.cat([x, sinks[head : head + 1]]) / tau[row]
            expected = torch.softmax(x, -1)[:-1]
            assert torch.allclose(p[head, row, visible], expected)
    assert (p[:, 1] == 0).all() and (p[:, :, 2] == 0).all()
    blind = torch.zeros(5, dtype=torch.bool)
    assert (scoring.noisy_softmax(logits, None, tau, blind, sinks) == 0).all()


def test_score_rows_uses_slopes_and_sinks_of_each_query_head():
    query, key = torch.randn(4, 3, 8), torch.randn(2, 6, 8)
    key_position = torch.tensor([[0, 2, 5, 7, 8, 9], [1, 2, 3, 7, 8, 9]])
    query_position, tau = torch.tensor([7, 8, 9]), torch.tensor([1.0, 1.5, 2.0])
    slopes, sinks = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.0, 1, 2, 3])
    scores = scoring.score_rows(
        query,
        key,
        query_position,
        key_position,
        tau,
        noise_key=noise.NO_NOISE,
        layer_index=0,
        first_query_head=0,
        scale=0.3,
        alibi_slopes=slopes,
        sinks=sinks,
    )
    expected = torch.zeros(2, 3, 6)
    for head in range(4):
        x = 0.3 * query[head] @ key[head // 2].T
        x = x + slopes[head] * (key_position[head // 2] - query_position[:, None])
        weight = (x / tau[:, None]).exp()
        total = weight.sum(-1) + (sinks[head] / tau).exp()
        expected[head // 2] += weight / total[:, None]
    assert torch.allclose(scores, expected, atol=1e-6)


def test_places_move_the_bias_and_not_the_noise():
    query, key = torch.randn(2, 2, 8), torch.randn(1, 4, 8)
    arguments = {
        "query": query,
        "key": key,
        "query_position": torch.tensor([20, 21]),
        "key_position": torch.tensor([[0, 9, 20, 21]]),
        "tau": torch.tensor([1.0, 1.5]),
        "noise_key": noise.request_noise_key(3, 4),
        "layer_index": 2,
        "first_query_head": 0,
        "scale": 0.3,
    }
    slopes, query_place = torch.tensor([0.5, 0.1]), torch.tensor([2, 3])
    scores = scoring.score_rows(
        **arguments,
        alibi_slopes=slopes,
        query_place=query_place,
        key_place=torch.arange(4)[None],
    )
    # The bias is linear: moved into the keys, where noise and places play no part.
    wide_query = torch.cat([query, slopes[:, None, None].expand(-1, 2, 1) / 0.3], -1)
    wide_key = torch.cat([key, torch.arange(4.0)[None, :, None]], -1)
    arguments |= {"query": wide_query, "key": wide_key}
    assert torch.allclose(scores, scoring.score_rows(**arguments), atol=1e-6)


def test_score_rows_follows_stored_positions_and_masks():
    """Noise belongs to a key's position, wherever the key lies and whoever asks."""
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(4, 3, 8, generator=generator)
    key = torch.randn(2, 6, 8, generator=generator)
    key_position = torch.tensor([[0, 2, 5, 7, 8, 9], [1, 2, 3, 7, 8, 9]])
    query_position, tau = torch.tensor([7, 8, 9]), torch.tensor([1.0, 0.0, 1.5])
    visible = torch.ones(3, 6, dtype=torch.bool).tril(3)
    arguments = {"layer_index": 1, "first_query_head": 8, "scale": 0.3}
    noise_key = noise.request_noise_key(1, 1)
    scores = scoring.score_rows(
        query,
        key,
        query_position,
        key_position,
        tau,
        visible,
        noise_key=noise_key,
        **arguments,
    )
    assert scores.shape == (2, 3, 6) and (scores[:, 1] == 0).all()
    assert torch.allclose(scores[:, [0, 2]].sum(-1), torch.full((2, 2), 2.0))
    assert (scores[:, 0, 4:] == 0).all()
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    shuffled = scoring.score_rows(
        query,
        key[:, order],
        query_position,
        key_position[:, order],
        tau,
        visible[:, order],
        noise_key=noise_key,
        **arguments,
    )
    assert torch.allclose(shuffled, scores[:, :, order], atol=1e-6)
    other = scoring.score_rows(
        query,
        key,
        query_position,
        key_position + 1,
        tau,
        visible,
        noise_key=noise_key,
        **arguments,
    )
    assert not torch.allclose(other, scores, atol=1e-3)
