# SPDX-License-Identifier: Apache-2.0
"""An audit changes nothing for a request and measures what an eviction would.

The attention that tokens still get is compared with that of a Hugging Face forward,
for the tokens that the trace names.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from keyformer_vllm.adapters.audit import AuditedStep
from tests.e2e.conftest import POLICY
from tests.engine import Engine, Request, random_prompt
from tests.hf_attention import load_as_served

AUDIT = POLICY | {"audit": True}
PROMPTS = [(200, 1), (90, 2), (333, 3)]
NEW_TOKENS = 70


@pytest.fixture(scope="module", params=["llama-9-3", "bloom"])
def engines(request, start_engine) -> tuple[Engine, Engine]:
    """Audited and stock; prompts come in chunks, beside requests that decode."""
    settings = {"max_num_batched_tokens": 256}
    return (
        start_engine(request.param, AUDIT, **settings),
        start_engine(request.param, None, **settings),
    )


@pytest.fixture
def measured(engines, monkeypatch) -> Iterator[dict[str, list[AuditedStep]]]:
    """Every step that is measured meanwhile, by request id."""
    steps: dict[str, list[AuditedStep]] = defaultdict(list)
    accounting = engines[0].scheduler.accounting
    note = accounting.audited

    def noting(found: dict[str, AuditedStep]) -> None:
        for request_id, step in found.items():
            steps[request_id].append(step)
        note(found)

    monkeypatch.setattr(accounting, "audited", noting)
    return steps


def serve(engine: Engine, **params: Any) -> list[Request]:
    requests = [
        engine.add(random_prompt(*prompt), max_tokens=NEW_TOKENS, seed=5, **params)
        for prompt in PROMPTS
    ]
    engine.run()
    return requests


def test_tokens_are_those_of_stock_vllm(engines, measured):
    """And every block stays, although evictions were worked out."""
    audited, stock = engines
    request = audited.add(random_prompt(200, 1), max_tokens=NEW_TOKENS, seed=5)
    while audited.busy:
        held = audited.blocks_of(request.engine_id)
        computed = max(0, 200 + len(request.tokens) - 1)
        assert held == 0 or held * 32 >= computed
        audited.step()
    assert sum("kept" in line for line in audited.trace_of(request)) >= 3
    for policy in ("keyformer", "streaming"):
        found = serve(audited, kv={"kv_policy": policy}, logprobs=0)
        expected = serve(stock, logprobs=0)
        for one, other in zip(found, expected, strict=True):
            assert one.tokens == other.tokens
            assert measured[one.engine_id]
            for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
                assert mine == pytest.approx(theirs, abs=2e-4)


@pytest.mark.parametrize("policy", ["keyformer", "streaming"])
def test_mass_lost_is_the_attention_of_a_full_forward(engines, measured, policy):
    """Catches a front with the wrong tokens, heads or layers that are left out, and a
    step that is read one too early."""
    audited, _ = engines
    kv = {"kv_policy": policy}
    request = audited.add(random_prompt(300, 7), max_tokens=NEW_TOKENS, kv=kv)
    audited.run()
    kept_sets = audited.kept_sets(request)
    assert len(kept_sets) >= 3
    model = load_as_served(audited.model_runner.model_config.model)
    computed = [*request.prompt, *request.tokens[:-1]]
    with torch.inference_mode():
        output = model(torch.tensor([computed]), output_attentions=True)
    attention = torch.stack(output.attentions)[:, 0]  # [layers, heads, n, n]
    expected = []
    front = torch.zeros(attention.shape[:2] + attention.shape[3:], dtype=torch.bool)
    for position in range(len(request.prompt), len(computed)):
        if position in kept_sets:
            front = front_of(kept_sets[position], position, front)
        if front.any():
            lost = (attention[:, :, position] * front).sum(-1).mean()
            expected.append(float(lost))
    found = [step.mass_lost for step in measured[request.engine_id]]
    assert found == pytest.approx(expected, abs=2e-5)
    assert max(found) > 0.05


def front_of(kept: Any, computed: int, like: torch.Tensor) -> torch.Tensor:
    """Tokens that are gone by then, bool [layers, query heads, n]."""
    front = torch.zeros_like(like)
    num_heads = like.shape[1]
    for layer, heads in enumerate(kept):
        for head in range(num_heads):
            front[layer, head, :computed] = True
            front[layer, head, heads[head * len(heads) // num_heads]] = False
    return front


def test_tolerance_is_the_margin_over_the_change(engines, measured, monkeypatch):
    """The margin from what the request's own log-probabilities say."""
    audited, _ = engines
    changes: list[float] = []
    audit = audited.worker.keyformer.audit
    take = audit.take

    def noting(logits: torch.Tensor) -> dict[str, AuditedStep]:
        if audit._request_ids:
            _, change, norm = audit._measured[:, audit._measured_rows].unbind(-1)
            relative = (change.sum(-1) / norm.sum(-1)).mean().sqrt()
            changes.append(float(relative))
        return take(logits)

    monkeypatch.setattr(audit, "take", noting)
    request = audited.add(random_prompt(300, 8), max_tokens=50, logprobs=2)
    audited.run()
    steps = measured[request.engine_id]
    assert len(steps) == len(changes) > 40
    margins = []
    for position in request.logprobs[-len(steps) :]:
        first, second = sorted(position.values())[::-1]
        margins.append(first - second)
    products = [step.tolerance * c for step, c in zip(steps, changes, strict=True)]
    assert products == pytest.approx(margins, abs=1e-4)


def test_a_preempted_request_is_audited_anew(start_engine):
    """Its tokens are computed again into blocks that hold nothing of the exchange."""
    settings = {"num_blocks": 17, "max_num_batched_tokens": 128, "max_model_len": 512}
    audited = start_engine("llama-4-2", AUDIT, **settings)
    stock = start_engine("llama-4-2", None, **settings)
    asked = [random_prompt(100 + 30 * i, i) for i in range(3)]
    found = audited.generate(asked, max_tokens=200)
    expected = stock.generate(asked, max_tokens=200)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    traces = [audited.trace_of(request) for request in found]
    restarts = sum(
        later["evicted_blocks"] < earlier["evicted_blocks"]
        for lines in traces
        for earlier, later in itertools.pairwise(lines)
    )
    assert restarts > 0


def test_the_prefix_cache_never_gives_exchanged_tokens(start_engine):
    """Half of the requests start like others that are being audited, or were."""
    audited = start_engine(
        "llama-4-2", AUDIT, caching=True, num_blocks=60, max_model_len=1024
    )
    stock = start_engine("llama-4-2", None)
    start = random_prompt(250, 20)
    asked = [start + random_prompt(40, seed) for seed in range(6)]
    asked += [prompt + random_prompt(30, 30) for prompt in asked[:3]]
    found = []
    for prompt in asked:
        found.append(audited.add(prompt, max_tokens=60))
        for _ in range(25):
            audited.step()
    audited.run()
    assert sum(request.num_cached_tokens for request in found) > 1000
    expected = stock.generate(asked, max_tokens=60)
    assert [r.tokens for r in found] == [r.tokens for r in expected]


@pytest.mark.parametrize("policy", ["keyformer", "h2o", "streaming", "random"])
def test_the_first_kept_set_is_a_real_runs(shared, policy):
    """Up to there nothing differs, so what is ranked is the same to the bit."""
    kv = {"kv_policy": policy, "kv_budget": 0.4}
    kept = []
    for engine in shared:
        request = engine.add(random_prompt(230, 9), max_tokens=20, kv=kv, seed=3)
        engine.run()
        computed, sets = next(iter(engine.kept_sets(request).items()))
        kept.append((computed, sets))
    assert kept[0] == kept[1]


@pytest.fixture(scope="module")
def shared(start_engine) -> tuple[Engine, Engine]:
    """Audited and evicting."""
    return start_engine("llama-4-2", AUDIT), start_engine("llama-4-2", POLICY)
