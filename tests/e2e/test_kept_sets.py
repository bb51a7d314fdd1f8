# SPDX-License-Identifier: Apache-2.0
"""What the engine keeps is what the policy keeps.

The oracle runs inside a Hugging Face forward, fed with the engine's tokens, and is
asked at every eviction which tokens of each layer and KV head it would keep. Sets may
differ only where two scores are as good as tied.
"""

from __future__ import annotations

from typing import Any

import pytest

from keyformer_vllm.config import KeyformerConfig
from tests.e2e.conftest import POLICY
from tests.engine import Engine, Request, random_prompt
from tests.hf_reference import Disagreement, HFReference, oracle_request

TIE = 1e-5
"""Relative difference of two scores that fp32 sums in another order may swap."""

RANKING = ("keyformer", "h2o", "key-only", "random")
POSITIONAL = ("streaming", "window")


def follow(
    engine: Engine,
    reference: HFReference,
    request: Request,
    policy: dict[str, object],
    kv: dict[str, object] | None = None,
    request_seed: int = 0,
) -> list[Disagreement]:
    config = KeyformerConfig.from_mapping(policy).with_request(kv)
    kept_sets = engine.kept_sets(request)
    assert kept_sets, "nothing was evicted"
    return reference.follow(
        request.prompt,
        request.tokens,
        oracle_request(
            config,
            len(request.prompt),
            len(request.tokens),
            interval=engine.block_size,
            request_seed=request_seed,
        ),
        kept_sets,
    )


def check_kept_sets(*args: Any, **kwargs: Any) -> None:
    disagreements = follow(*args, **kwargs)
    assert all(entry.gap <= TIE for entry in disagreements), disagreements


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine("llama-9-3")


@pytest.fixture(scope="module")
def reference(tiny_model):
    return HFReference(tiny_model("llama-9-3"))


@pytest.mark.parametrize("policy", [*RANKING, *POSITIONAL])
def test_every_policy(engine, reference, policy):
    """Catches a wrong sign, window, sink count, noise stream or tau; decode scores
    that are lost or counted twice; scores that do not move with their tokens."""
    kv = {"kv_policy": policy, "kv_budget": 0.4}
    request = engine.add(random_prompt(170, 3), max_tokens=100, kv=kv, seed=11)
    engine.run()
    assert len(engine.kept_sets(request)) >= 4
    check_kept_sets(engine, reference, request, POLICY, kv, request_seed=11)


def test_policies_differ(engine):
    """Catches a policy name that reaches the engine but not the choice (A27)."""
    requests = [
        engine.add(random_prompt(170, 3), max_tokens=8, kv={"kv_policy": policy})
        for policy in (*RANKING, *POSITIONAL)
    ]
    engine.run()
    sets = [str(engine.kept_sets(request)) for request in requests]
    assert len(set(sets)) == len(sets)


@pytest.mark.parametrize(
    ("kind", "block_size"),
    [("llama-4-2", 64), ("gptj", 32), ("gpt2", 128), ("bloom", 32)],
)
def test_every_architecture(start_engine, tiny_model, kind, block_size):
    """Grouped and plain heads, partial rotary, learned positions, other intervals;
    a prompt in three chunks beside another request (A19)."""
    engine = start_engine(kind, block_size=block_size, max_num_batched_tokens=96)
    other = engine.add(random_prompt(50, 1), max_tokens=90)
    request = engine.add(random_prompt(230, 4), max_tokens=150)
    engine.run()
    reference = HFReference(tiny_model(kind))
    assert other.finished
    check_kept_sets(engine, reference, request, POLICY)


@pytest.mark.parametrize(
    "changes",
    [
        {"noise": "none", "tau_init": 0.5, "tau_end": 4.0},
        {"select": "block", "noise": "none"},
        {"select": "block", "score_queries": "last:32"},
        {"budget_base": "sequence", "budget": 0.3},
        {"recent_ratio": 0.6, "sinks": 0, "seed": 12345},
        {"score_queries": "last:1", "sinks": 20, "recent_ratio": 0.0},
        {"score_queries": "stride:7"},
        {"score_mode": "deferred"},
        {"score_mode": "step"},
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()),
)
def test_every_setting(start_engine, tiny_model, changes):
    """Catches a setting that does not reach the scores or the selection."""
    policy = POLICY | changes
    engine = start_engine("llama-4-2", policy)
    request = engine.add(random_prompt(150, 5), max_tokens=100)
    engine.run()
    check_kept_sets(engine, HFReference(tiny_model("llama-4-2")), request, policy)


def test_compact_positions_score_as_they_attend(start_engine, tiny_model):
    """Catches scores that take their bias from original positions; the oracle that
    does so chooses differently."""
    policy = POLICY | {"positions": "compact"}
    engine = start_engine("bloom", policy)
    request = engine.add(random_prompt(230, 4), max_tokens=200)
    engine.run()
    reference = HFReference(tiny_model("bloom"))
    check_kept_sets(engine, reference, request, policy)
    others = follow(engine, reference, request, POLICY)
    assert any(entry.gap > 100 * TIE for entry in others), others


def test_the_request_seed_is_part_of_the_noise(engine, reference):
    """Same prompt, two seeds: different sets, each the oracle's for that seed."""
    prompt = random_prompt(120, 6)
    one, two = (engine.add(prompt, max_tokens=3, seed=seed) for seed in (1, 2))
    engine.run()
    check_kept_sets(engine, reference, one, POLICY, request_seed=1)
    check_kept_sets(engine, reference, two, POLICY, request_seed=2)
    assert engine.kept_sets(one) != engine.kept_sets(two)


def test_one_set_per_kv_head(engine):
    """Shared by the query heads of a group, different from head to head (A22)."""
    request = engine.add(random_prompt(150, 7), max_tokens=3)
    engine.run()
    (kept,) = engine.kept_sets(request).values()
    assert len(kept) == 2 and all(len(layer) == 3 for layer in kept)
    assert len({tuple(head) for layer in kept for head in layer}) == 6


def test_real_model(start_engine, smollm2, article_tokens):
    policy = POLICY | {"min_tokens": 64}
    engine = start_engine(smollm2, policy)
    request = engine.add(article_tokens[:190], max_tokens=50)
    engine.run()
    check_kept_sets(engine, HFReference(smollm2), request, policy)
