# SPDX-License-Identifier: Apache-2.0
"""The golden model against a second one that shares no line with it but the noise."""

import numpy as np
import pytest
import torch

from keyformer_vllm.core import noise
from keyformer_vllm.core.oracle import OracleLayer, OracleRequest
from keyformer_vllm.core.policies import POLICIES, get_policy
from keyformer_vllm.core.retention import Retention

PROMPT, GENERATED, HEAD_SIZE, LAYER, SCALE = 37, 24, 8, 3, 0.4
NOISE_KEY = noise.request_noise_key(7, 11)


def make_retention(policy="keyformer", block_size=1, budget=0.5, **kwargs):
    arguments = {"num_prompt_tokens": PROMPT, "sinks": 2} | kwargs
    return Retention.resolve(
        get_policy(policy), block_size=block_size, budget=budget, **arguments
    )


def make_layer(retention, num_query_heads=4, num_kv_heads=2, **kwargs):
    layer_arguments = {
        name: kwargs.pop(name)
        for name in ("soft_cap", "first_query_head", "alibi_slopes")
        if name in kwargs
    }
    arguments = {"max_tokens": GENERATED, "noise_key": NOISE_KEY} | kwargs
    request = OracleRequest(retention, **arguments)
    return OracleLayer(
        request, LAYER, num_query_heads, num_kv_heads, SCALE, **layer_arguments
    )


def make_tensors(num_query_heads=4, num_kv_heads=2, dtype=torch.float64, seed=0):
    """q, k, v of a whole request: [heads, PROMPT + GENERATED, HEAD_SIZE]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(
            heads,
            PROMPT + GENERATED,
            HEAD_SIZE,
            generator=generator,
            dtype=torch.float64,
        ).to(dtype)
        * 1.5
        for heads in (num_query_heads, num_kv_heads, num_kv_heads)
    )


def run(layer, tensors, chunks=(PROMPT,), generated=GENERATED):
    """Feed a prompt in chunks and then token by token; return the outputs."""
    outputs, start = [], 0
    for size in [*chunks, *[1] * generated]:
        outputs.append(layer.attend(*(x[:, start : start + size] for x in tensors)))
        start += size
    return torch.cat(outputs, dim=1)


class BruteForce:
    """Keyformer over lists of tokens, in NumPy; evicted tokens leave their list."""

    def __init__(
        self,
        policy,
        interval,
        budget,
        frozen=False,
        run_size=1,
        last=None,
        stride=1,
        slopes=None,
        compact=False,
    ):
        self.policy, self.interval, self.frozen = policy, interval, frozen
        self.run_size, self.last, self.stride = run_size, last, stride
        self.slopes, self.compact = slopes, compact
        self.k = budget if isinstance(budget, int) else int(budget * PROMPT)
        self.history, self.evicted = [], 0

    def counts(self, num_tokens):
        """(to keep, sinks, recent window) by the documentation."""
        evicted = (num_tokens - self.k) // self.interval * self.interval
        keep = num_tokens - evicted
        if self.policy == "window":
            return keep, 0, keep
        if self.policy == "streaming":
            return keep, 2, keep - 2
        window = {"h2o": self.k // 2, "key-only": 0}.get(self.policy, self.k // 5)
        return keep, 2, window

    def tau_and_noise(self, position, head, keys):
        if self.policy == "h2o":
            return 1.0, 0.0
        rows = noise.row_keys(NOISE_KEY, LAYER, head, position)
        t = max(0, position - PROMPT + 1)
        gumbel = noise.gumbel(rows, torch.tensor(keys)).double().numpy()
        return 1.0 + t / GENERATED, gumbel

    def evict(self, tokens, kv_head, num_tokens):
        keep, sinks, window = self.counts(num_tokens)
        if self.frozen:
            # What the reference's masks amount to: candidates end at n - w, the
            # recent tokens are the last w counting the one about to come.
            tokens = [t for t in tokens if t["position"] != num_tokens - window]
            keep, window = keep - 1, window - 1
        kept, rest = [], []
        for token in tokens:
            always = token["position"] < sinks
            always |= token["position"] >= num_tokens - window
            (kept if always else rest).append(token)
        if self.policy == "random":
            for token in rest:
                p = token["position"]
                rows = noise.row_keys(NOISE_KEY, LAYER, kv_head, p)
                token["score"] = noise.uniform(rows, p).item()

        def rank(token):
            own = token["position"] // self.run_size
            run = [t["score"] for t in rest if t["position"] // self.run_size == own]
            return -sum(run), own, token["position"]

        kept += sorted(rest, key=rank)[: keep - len(kept)]
        return sorted(kept, key=lambda token: token["position"])

    def run(self, query, key, value):
        num_query_heads, num_tokens = query.shape[:2]
        num_kv_heads = key.shape[0]
        group = num_query_heads // num_kv_heads
        heads = [[] for _ in range(num_kv_heads)]
        output = np.zeros(query.shape)
        for i in range(num_tokens):
            evicted = (i - self.k) // self.interval
            if i >= PROMPT and self.policy != "full" and evicted > self.evicted:
                self.evicted = evicted
                heads = [self.evict(tokens, h, i) for h, tokens in enumerate(heads)]
                self.history.append([[t["position"] for t in h] for h in heads])
            for h, tokens in enumerate(heads):
                tokens.append(
                    {"position": i, "k": key[h, i], "v": value[h, i], "score": 0.0}
                )
                positions = [t["position"] for t in tokens]
                for head in range(h * group, (h + 1) * group):
                    x = np.array([SCALE * t["k"] @ query[head, i] for t in tokens])
                    if self.slopes is not None:
                        places = range(len(tokens)) if self.compact else positions
                        x += self.slopes[head] * (np.array(places) - places[-1])
                    weight = np.exp(x) / np.exp(x).sum()
                    for w, token in zip(weight, tokens, strict=True):
                        output[head, i] += w * token["v"]
                    if self.last is not None and i < PROMPT - self.last:
                        continue
                    if i < PROMPT and i not in range(PROMPT - 1, -1, -self.stride):
                        continue
                    tau, gumbel = self.tau_and_noise(i, head, positions)
                    p = np.exp((x + gumbel) / tau)
                    for share, token in zip(p / p.sum(), tokens, strict=True):
                        token["score"] += share
        self.score = [[t["score"] for t in tokens] for tokens in heads]
        return output


def assert_equal_to_brute_force(layer, brute, tensors):
    output = run(layer, tensors)
    expected = brute.run(*(x.numpy() for x in tensors))
    history = [kept.position.tolist() for kept in layer.history]
    assert history == brute.history
    assert len(history) > 0 or brute.policy == "full"
    assert np.abs(output.numpy() - expected).max() < 1e-10
    if layer.request.policy.scores:
        # tau is rounded to fp32, so scores differ in the 8th digit.
        assert np.allclose(layer.score.numpy(), brute.score, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("interval", [1, 8])
def test_equals_brute_force(policy, interval):
    layer = make_layer(make_retention(policy, interval))
    assert_equal_to_brute_force(
        layer, BruteForce(policy, interval, 0.5), make_tensors()
    )


@pytest.mark.parametrize("num_query_heads, num_kv_heads", [(2, 2), (6, 2), (3, 1)])
def test_equals_brute_force_on_other_head_counts(num_query_heads, num_kv_heads):
    layer = make_layer(make_retention(budget=12), num_query_heads, num_kv_heads)
    tensors = make_tensors(num_query_heads, num_kv_heads)
    assert_equal_to_brute_force(layer, BruteForce("keyformer", 1, 12), tensors)


@pytest.mark.parametrize("interval", [1, 8])
def test_equals_brute_force_with_runs_of_the_last_queries(interval):
    layer = make_layer(
        make_retention(block_size=interval), run_size=16, last_prompt_queries=5
    )
    brute = BruteForce("keyformer", interval, 0.5, run_size=16, last=5)
    assert_equal_to_brute_force(layer, brute, make_tensors())


@pytest.mark.parametrize("stride", [2, 5, PROMPT - 1, PROMPT, 10 * PROMPT])
def test_equals_brute_force_with_every_sth_prompt_query(stride):
    """The newest prompt query scores whatever the stride; so does every later one."""
    layer = make_layer(make_retention(block_size=8), prompt_query_stride=stride)
    brute = BruteForce("keyformer", 8, 0.5, stride=stride)
    assert_equal_to_brute_force(layer, brute, make_tensors())


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("interval", [1, 8])
def test_equals_brute_force_with_a_bias(interval, compact):
    slopes = torch.tensor([0.4, 0.2, 0.1, 0.05])
    layer = make_layer(
        make_retention(block_size=interval),
        compact_positions=compact,
        alibi_slopes=slopes,
    )
    brute = BruteForce(
        "keyformer", interval, 0.5, slopes=slopes.double().numpy(), compact=compact
    )
    assert_equal_to_brute_force(layer, brute, make_tensors())


def test_frozen_key_set_reproduces_the_reference():
    retention, tensors = make_retention(), make_tensors()
    # A generated token that every later query looks at.
    tensors[0][..., 0] += 2.0
    tensors[1][:, PROMPT + 3, 0] += 6.0
    frozen = make_layer(retention, frozen_key_set=True)
    brute = BruteForce("keyformer", 1, 0.5, frozen=True)
    assert_equal_to_brute_force(frozen, brute, tensors)
    budget, window = 18, 3
    for kept in frozen.history:
        assert kept.position.shape[1] == budget - 1
        keys = kept.position[:, : budget - window]
        assert torch.equal(keys, frozen.history[0].position[:, : budget - window])
        recent = torch.arange(kept.num_tokens - window + 1, kept.num_tokens)
        assert (kept.position[:, budget - window :] == recent).all()

    paper = make_layer(retention)
    run(paper, tensors)
    keys = paper.history[-1].position[:, : budget - window]
    assert (keys == PROMPT + 3).any(-1).all()


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "full"])
def test_interval_one_retains_exactly_k(policy):
    layer = make_layer(make_retention(policy, 1, 20))
    run(layer, make_tensors())
    assert [kept.position.shape for kept in layer.history] == [(2, 20)] * GENERATED
    assert layer.kv_len == 21 and layer.evicted_blocks == PROMPT + GENERATED - 21


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "full"])
def test_history_is_ascending_and_the_evicted_never_return(policy):
    layer = make_layer(make_retention(policy, 8))
    run(layer, make_tensors())
    previous, num_tokens = None, 0
    for kept in layer.history:
        assert (kept.position.diff(dim=1) > 0).all()
        assert 18 <= kept.position.shape[1] < 18 + 8
        assert kept.position.shape[1] == kept.num_tokens - 8 * kept.evicted_blocks
        for head in range(2 if previous is not None else 0):
            old = {*previous[head].tolist(), *range(num_tokens, kept.num_tokens)}
            assert set(kept.position[head].tolist()) <= old
        previous, num_tokens = kept.position, kept.num_tokens
    assert len(layer.history) > 3


@pytest.mark.parametrize("chunks", [(1,) * PROMPT, (16, 16, 5), (36, 1), (1, 36)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_do_not_depend_on_chunks_to_the_bit(chunks, dtype):
    tensors = make_tensors(6, 2, dtype)
    whole = make_layer(make_retention(), 6, 2)
    chunked = make_layer(make_retention(), 6, 2)
    output = run(whole, tensors)
    chunked_output = run(chunked, tensors, chunks)
    assert whole.score.dtype == dtype
    assert torch.equal(whole.score, chunked.score)
    for a, b in zip(whole.history, chunked.history, strict=True):
        assert torch.equal(a.position, b.position)
    # The output of several rows at once may round differently.
    assert torch.allclose(output, chunked_output, atol=1e-5)


def plain_attention(tensors):
    query, key, value = tensors
    key, value = (
        x.repeat_interleave(query.shape[0] // x.shape[0], 0) for x in (key, value)
    )
    logits = SCALE * query @ key.transpose(-1, -2)
    causal = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    weights = torch.softmax(logits.masked_fill(~causal, -torch.inf), dim=-1)
    return weights, weights @ value


@pytest.mark.parametrize("policy", ["full", "keyformer", "h2o"])
def test_budget_one_is_plain_attention(policy):
    layer, tensors = make_layer(make_retention(policy, 8, 1.0)), make_tensors()
    output = run(layer, tensors)
    assert torch.allclose(output, plain_attention(tensors)[1], atol=1e-12)
    assert layer.history == [] and layer.kv_len == PROMPT + GENERATED


@pytest.mark.parametrize(
    "policy, settings",
    [
        ("keyformer", {"noise_key": noise.NO_NOISE, "tau_end": 1.0}),
        ("h2o", {"tau_init": 7.0}),  # neither noise nor tau reaches h2o
    ],
)
def test_without_noise_and_tau_scores_are_accumulated_attention(policy, settings):
    layer, tensors = (
        make_layer(make_retention(policy, 8, 1.0), **settings),
        make_tensors(),
    )
    run(layer, tensors)
    weights = plain_attention(tensors)[0]
    expected = weights.sum(1).unflatten(0, (2, 2)).sum(1)
    assert torch.allclose(layer.score, expected, atol=1e-12)


def test_a_row_adds_one_per_query_head():
    layer = make_layer(make_retention(budget=1.0), 6, 2)
    run(layer, make_tensors(6, 2))
    total = torch.full((2,), 3.0 * (PROMPT + GENERATED), dtype=torch.float64)
    assert torch.allclose(layer.score.sum(-1), total)


def test_gqa_score_is_the_sum_over_query_heads():
    """Each query head alone, told its global index, gives its share of the sum."""
    query, key, value = make_tensors(4, 2)
    together = make_layer(make_retention(budget=1.0), 4, 2)
    run(together, (query, key, value))
    for kv_head in range(2):
        total = torch.zeros(PROMPT + GENERATED, dtype=torch.float64)
        for head in (2 * kv_head, 2 * kv_head + 1):
            alone = make_layer(make_retention(budget=1.0), 1, 1, first_query_head=head)
            tensors = (query[head, None], key[kv_head, None], value[kv_head, None])
            run(alone, tensors)
            total += alone.score[0]
        assert torch.allclose(together.score[kv_head], total, atol=1e-12)


def test_a_shard_of_the_heads_decides_as_the_whole():
    """Tensor parallel: heads 2 and 3 on their own rank keep what they keep in all."""
    query, key, value = make_tensors(4, 2)
    for policy in ("keyformer", "random"):
        whole = make_layer(make_retention(policy, 8), 4, 2)
        output = run(whole, (query, key, value))
        shard = make_layer(make_retention(policy, 8), 2, 1, first_query_head=2)
        sharded = run(shard, (query[2:], key[1:], value[1:]))
        assert torch.allclose(output[2:], sharded, atol=1e-12)
        for a, b in zip(whole.history, shard.history, strict=True):
            assert torch.equal(a.position[1:], b.position)


def test_last_prompt_queries_score_alone():
    layer, tensors = (
        make_layer(make_retention(budget=1.0), last_prompt_queries=5),
        make_tensors(),
    )
    run(layer, tensors, generated=0)
    assert torch.allclose(layer.score.sum(-1), torch.tensor(10.0, dtype=torch.float64))
    every = make_layer(make_retention(budget=1.0), last_prompt_queries=PROMPT)
    run(every, tensors, generated=0)
    first = make_layer(make_retention(budget=1.0, num_prompt_tokens=PROMPT - 5))
    run(first, tensors, chunks=(PROMPT - 5,), generated=0)
    assert torch.allclose(every.score[:, -5:], layer.score[:, -5:], atol=1e-12)
    difference = every.score[:, :-5] - layer.score[:, :-5]
    assert torch.allclose(difference, first.score, atol=1e-12)


def test_soft_cap_reaches_output_and_score():
    query, key, value = make_tensors()
    layer = make_layer(
        make_retention(budget=1.0), soft_cap=0.7, noise_key=0, tau_end=1.0
    )
    output = run(layer, (query, key, value))
    logits = SCALE * query @ key.repeat_interleave(2, 0).transpose(-1, -2)
    causal = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    capped = 0.7 * torch.tanh(logits / 0.7)
    weights = torch.softmax(capped.masked_fill(~causal, -torch.inf), dim=-1)
    expected = weights @ value.repeat_interleave(2, 0)
    assert torch.allclose(output, expected, atol=1e-12)
    score = weights.sum(1).unflatten(0, (2, 2)).sum(1)
    assert torch.allclose(layer.score, score, atol=1e-12)


def test_fp32_agrees_with_fp64():
    single, double = (make_layer(make_retention(block_size=8)) for _ in range(2))
    output = run(single, make_tensors(dtype=torch.float32))
    exact = run(double, make_tensors(dtype=torch.float64))
    assert output.dtype == torch.float32
    assert (output - exact).abs().max() < 1e-5
    for a, b in zip(single.history, double.history, strict=True):
        assert torch.equal(a.position, b.position)


def test_noise_changes_what_is_kept_and_requests_differ():
    kept = []
    for key in (noise.NO_NOISE, NOISE_KEY, noise.request_noise_key(7, 12)):
        layer = make_layer(make_retention(block_size=8), noise_key=key)
        run(layer, make_tensors())
        kept.append(layer.history[0].position)
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])


def test_a_resumed_request_attends_in_full_before_it_evicts_again():
    """Preempted after 10 tokens: prompt and answer are prefilled, then it evicts."""
    layer = make_layer(make_retention(block_size=8), num_prefill_tokens=PROMPT + 10)
    tensors = make_tensors()
    run(layer, tensors, chunks=(30, 17), generated=0)
    assert layer.history == [] and layer.kv_len == PROMPT + 10
    start = PROMPT + 10
    layer.attend(*(x[:, start : start + 1] for x in tensors))
    assert layer.history[0].position.shape == (2, start - 24)
    assert layer.evicted_blocks == 3


def test_a_prompt_of_one_token():
    retention = make_retention(block_size=1, num_prompt_tokens=1)
    layer, tensors = make_layer(retention), make_tensors()
    output = run(layer, tensors, chunks=(1,), generated=6)
    assert output.isfinite().all() and layer.kv_len == 2
    assert [kept.position.tolist() for kept in layer.history] == [
        [[i - 1]] * 2 for i in range(2, 7)
    ]


def test_misuse_is_an_internal_error():
    tensors = make_tensors()
    with pytest.raises(AssertionError):  # a chunk that runs past the prompt
        run(make_layer(make_retention()), tensors, chunks=(PROMPT + 1,), generated=0)
    with pytest.raises(AssertionError, match="one token"):
        run(make_layer(make_retention()), tensors, chunks=(PROMPT, 2), generated=0)
    with pytest.raises(AssertionError, match="every step"):
        make_layer(make_retention(block_size=8), frozen_key_set=True)
    with pytest.raises(AssertionError, match="streaming"):
        make_layer(make_retention("streaming"), frozen_key_set=True)
    with pytest.raises(AssertionError, match="random"):
        make_layer(make_retention("random"), noise_key=noise.NO_NOISE)
