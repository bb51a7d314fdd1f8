# SPDX-License-Identifier: Apache-2.0
"""Scheduler and block manager with vLLM's own machinery and a worker without a model.

Cases: A02, A03, A10, A11, A12, A16, A17, A20, A32, A33, A35 of public reports on
eviction: lengths after preemption, blocks that come straight back, blocks lost or
freed twice, stale decisions, requests that can never run.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from keyformer_vllm.adapters.audit import AuditedStep
from keyformer_vllm.adapters.plan import plan_of
from keyformer_vllm.adapters.scheduler import describe_policy
from keyformer_vllm.config import KVPolicyError
from keyformer_vllm.metrics import PREFIX
from tests.adapters.scheduler_harness import BLOCK_SIZE, Harness

AUDIT_COUNTS = (
    "audit_evictions",
    "audit_evicted_tokens",
    "audit_steps_at_risk",
    "audit_mass_lost=8000",
    "audit_mass_lost=2000",
)


@pytest.fixture(scope="module")
def harness(tiny_model):
    def make(num_blocks: int = 200, **settings: Any) -> Harness:
        return Harness(tiny_model("llama-4-2"), num_blocks, **settings)

    return make


@pytest.mark.parametrize("prompt", [100, 127, 128, 129, 511])
def test_blocks_come_back_in_the_first_decode_step_and_stay_away(harness, prompt):
    h = harness()
    h.add("a", prompt, 200)
    while h.scheduler.requests["a"].num_computed_tokens < prompt:
        h.step()
    assert len(h.blocks_of("a")) == -(-prompt // BLOCK_SIZE)
    assert not h.scheduler.evicted_blocks
    budget = prompt // 2
    retention = h.scheduler.retentions["a"]
    for _ in range(190):
        h.step()
        computed = h.scheduler.requests["a"].num_computed_tokens
        kept = [block for block in h.blocks_of("a") if not block.is_null]
        # The step's own token came on top of what was retained at its head.
        retained = retention.kv_len(computed - 1)
        assert budget <= retained < budget + BLOCK_SIZE or retained == computed - 1
        assert len(kept) <= -(-(budget + BLOCK_SIZE - 1) // BLOCK_SIZE) + 1
        assert len(kept) == -(-computed // BLOCK_SIZE) - h.scheduler.evicted_blocks["a"]
    h.run()
    h.check_idle()


def test_freed_blocks_serve_a_request_that_fits_nowhere_else(harness):
    # 31 usable blocks; "a" needs 17 and "b" 16: only eviction makes room for both.
    h = harness(num_blocks=32, engine={"max_num_batched_tokens": 1024})
    h.add("a", 512, 64)
    h.add("b", 500, 8)
    output = h.step()
    assert set(output.num_scheduled_tokens) == {"a"}
    output = h.step()
    assert plan_of(output).evictions["a"].counts.num_evict == 256
    assert set(output.num_scheduled_tokens) == {"a", "b"}, "freed in the same step"
    h.run()
    assert h.scheduler.requests == {}
    h.check_idle()


def test_preempted_request_starts_over(harness):
    h = harness(
        num_blocks=15,
        budget=0.8,
        budget_base="sequence",
        engine={"max_num_batched_tokens": 512},
    )
    h.add("a", 150, 250)
    h.add("b", 150, 250)
    preempted = 0
    for _ in range(2000):
        if not h.scheduler.has_unfinished_requests():
            break
        output = h.step()
        for name in output.preempted_req_ids or ():
            preempted += 1
            assert name not in h.scheduler.evicted_blocks
            assert name not in plan_of(output).evictions
    assert preempted > 0
    assert h.finished == {"a", "b"}
    assert h.worker.num_evictions > 2
    h.run()
    h.check_idle()


def test_copies_for_the_cache_outlive_the_eviction_they_were_made_for(harness):
    """A step that evicts a request and then needs all its blocks for another.

    What the prefix cache names the copy of is not compacted in the end, but the name
    has moved to the copy: without it, the next hit would find whatever lies there.
    """
    h = harness(
        num_blocks=12, caching=True, engine={"long_prefill_token_threshold": 96}
    )
    # Both prompts come in chunks of three blocks. When "late" has a block to give up,
    # one block is free and "long" needs three.
    h.add("long", 284, 4, kv_policy="full")
    h.add("late", [7] * 128, 4, kv_budget=96)
    output = h.step()
    while not output.preempted_req_ids:
        output = h.step()
    plan = plan_of(output)
    assert output.preempted_req_ids == {"late"} and not plan.evictions
    ((_, target),) = plan.cache_copies
    assert h.pool.blocks[target].block_hash is not None, "or nobody can hit the copy"
    hit: set[int] = set()
    while h.scheduler.has_unfinished_requests():
        plan = plan_of(h.step())
        hit.update(block for blocks in plan.hits.values() for block in blocks)
    assert h.finished == {"long", "late"}
    assert target in hit, "the harness has seen what is in it"
    h.run()
    h.check_idle()


def test_prefix_cache_reset_preempts_running_requests(harness):
    h = harness()
    h.add("a", 300, 50)
    for _ in range(5):
        h.step()
    assert h.scheduler.evicted_blocks["a"] > 0
    assert h.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert h.scheduler.evicted_blocks == {}
    h.run()
    h.check_idle()


def test_chunked_prompt_is_never_evicted(harness):
    h = harness(engine={"max_num_batched_tokens": 64})
    h.add("a", 500, 4)
    for _ in range(7):
        output = h.step()
        assert not plan_of(output).evictions
    h.step()
    assert plan_of(h.step()).evictions["a"].counts.kv_len_before == 500


def test_an_audit_keeps_every_block_and_tells_what_it_measured(harness):
    h = harness(audit=True)
    h.measured = {"a": AuditedStep(0.02, 1e9), "full": AuditedStep(0.0, 1e9)}
    h.add("a", 400, 100, kv_report=True)
    h.add("full", 300, 20, kv_policy="full", kv_report=True)
    for _ in range(80):
        h.step()
        for request in h.scheduler.running:
            held = h.blocks_of(request.request_id)
            assert len(held) * BLOCK_SIZE >= request.num_computed_tokens
            assert not any(block.is_null for block in held)
    assert h.scheduler.evicted_blocks["a"] >= 8
    assert h.gauges["resident_tokens"] == h.gauges["logical_tokens"] > 400
    h.measured = {"a": AuditedStep(0.08, 0.0), "unknown": AuditedStep(1.0, 0.0)}
    h.run()
    h.check_idle()
    evicted = sum(entry.counts.num_evict for entry in h.planned)
    assert h.reports["full"]["kv_report"]["audit"]["evictions"] == 0
    report = h.reports["a"]["kv_report"]
    audit = report.pop("audit")
    assert report == {"evicted_tokens": 0, "resident_tokens": 499, "evictions": 0}
    late = audit["steps_at_risk"]
    assert 10 < late < audit["steps"] - 60
    mean = 0.02 + 0.06 * late / audit["steps"]
    assert audit.pop("mass_lost_mean") == pytest.approx(mean)
    assert audit == {
        "evicted_tokens": evicted,
        "evictions": len(h.planned),
        "steps": audit["steps"],
        "steps_at_risk": late,
        "mass_lost_max": 0.08,
    }
    counts = h.counts.take()
    assert {key: counts[PREFIX + key] for key in AUDIT_COUNTS} == {
        "audit_evictions": len(h.planned),
        "audit_evicted_tokens": evicted,
        "audit_steps_at_risk": late,
        "audit_mass_lost=8000": late,
        "audit_mass_lost=2000": audit["steps"] - late,
    }
    assert not [key for key in counts if key.startswith(f"{PREFIX}evicted")]
    assert (
        f"{PREFIX}freed_blocks" not in counts and f"{PREFIX}compactions" not in counts
    )


@pytest.mark.parametrize("extra", [{"kv_policy": "full"}, {"kv_budget": 1.0}])
def test_a_request_can_opt_out(harness, extra):
    h = harness()
    h.add("a", 300, 100, **extra)
    h.add("b", 300, 100)
    for _ in range(60):
        h.step()
        assert not any(block.is_null for block in h.blocks_of("a"))
    assert any(block.is_null for block in h.blocks_of("b"))
    h.run()
    h.check_idle()


def test_per_request_budget_is_the_requests_own(harness):
    h = harness()
    h.add("loose", 400, 10, kv_budget=0.9)
    h.add("tight", 400, 10, kv_budget=0.25)
    for _ in range(6):
        h.step()
    held = {
        name: sum(not block.is_null for block in h.blocks_of(name))
        for name in ("loose", "tight")
    }
    assert held == {"loose": 12, "tight": 4}


def test_what_was_evicted_is_counted_and_reported(harness):
    h = harness(steps_in_flight=1)
    h.add("a", 400, 100, kv_report=True)
    h.add("full", 300, 60, kv_policy="full", kv_report=1)
    h.add("short", 40, 20)
    h.add("once", 200, 1)
    h.add("quiet", 300, 60, kv_policy="h2o")
    h.run()
    evicted = sum(entry.counts.num_evict for entry in h.planned)
    assert len(h.planned) > 5
    assert h.gauges == {"resident_tokens": 0, "logical_tokens": 0}
    assert h.counts.take() == {
        f"{PREFIX}requests=keyformer": 3,
        f"{PREFIX}requests=full": 1,
        f"{PREFIX}requests=h2o": 1,
        f"{PREFIX}evicted_tokens": evicted,
        f"{PREFIX}freed_blocks": evicted // BLOCK_SIZE,
        f"{PREFIX}compactions": len(h.planned),
        f"{PREFIX}skipped_evictions=opted_out": 1,
        f"{PREFIX}skipped_evictions=within_budget": 1,
        f"{PREFIX}skipped_evictions=prompt": 1,
    }
    # 498 tokens when its last step began, 499 in the cache after it; k is 200.
    assert set(h.reports) == {"a", "full"}
    assert h.reports["a"]["kv_report"] == {
        "evicted_tokens": 288,
        "resident_tokens": 499 - 288,
        "evictions": 4,
    }
    assert h.reports["full"]["kv_report"] == {
        "evicted_tokens": 0,
        "resident_tokens": 359,
        "evictions": 0,
    }


def test_a_preempted_request_reports_what_it_did_since(harness):
    h = harness(num_blocks=15, budget=0.8, budget_base="sequence")
    h.add("a", 150, 250, kv_report=True)
    h.add("b", 150, 250, kv_report=True)
    h.run()
    reports = [h.reports[name]["kv_report"] for name in "ab"]
    assert all(r["evicted_tokens"] + r["resident_tokens"] == 399 for r in reports)
    assert h.worker.num_evictions == len(h.planned)
    counts = h.counts.take()
    assert counts[f"{PREFIX}compactions"] == len(h.planned)
    # Evictions before a preemption are counted, and not in the report.
    assert sum(report["evictions"] for report in reports) < len(h.planned)


def test_gauges_follow_the_running_requests(harness):
    h = harness()
    h.add("a", 500, 100)
    for _ in range(30):
        h.step()
    request = h.scheduler.requests["a"]
    evicted = h.scheduler.evicted_blocks["a"] * BLOCK_SIZE
    assert h.gauges == {
        "logical_tokens": request.num_computed_tokens,
        "resident_tokens": request.num_computed_tokens - evicted,
    }
    assert evicted > 200
    h.abort("a")
    h.run()


@pytest.mark.parametrize(
    ("settings", "said", "unsaid"),
    [
        (
            {},
            "4 sinks, recent window 20 % of the budget, selecting by token",
            (),
        ),
        ({"policy": "h2o"}, "recent window 50 % of the budget", ("gumbel",)),
        ({"policy": "window"}, "recent window all the rest", ("sinks", "noise")),
        ({"policy": "streaming"}, "4 sinks, recent window all the rest", ("score",)),
        ({"policy": "key-only"}, "recent window none", ()),
        ({"policy": "random"}, "selecting by token", ("noise", "queries")),
        ({"recent_ratio": 0}, "recent window 1 token", ()),
        ({"budget": 300}, "budget 300 tokens", ()),
        ({}, "score queries all, score mode fused", ()),
        # Two layers of four heads, eight requests.
        ({"score_mode": "deferred"}, "query ring 0.25 MiB for 8 requests", ()),
        ({"score_mode": "deferred"}, "score mode deferred", ()),
        ({"score_mode": "step"}, "score mode step", ("ring", "MiB")),
        ({}, "side data 512 bytes per block and layer (3.0 % of a page)", ()),
        (
            {"positions": "compact"},
            "side data 768 bytes per block and layer, 256 of them for positions "
            "compact (4.5 % of a page)",
            (),
        ),
        # 199 blocks; 63 for a prompt, 33 once it evicted, 64 without.
        ({}, "2048-token requests running at once: 5, 3 without eviction", ("cap",)),
        (
            {"engine": {"max_num_seqs": 4}},
            "running at once: 5, 3 without eviction; max_num_seqs=4 caps it: "
            "raise it to 5",
            (),
        ),
        ({"budget_base": "sequence"}, "budget 0.5 of the sequence", ()),
        ({"audit": True}, "policy keyformer (audit: nothing is evicted): ", ()),
        ({"audit": True}, "running at once: 3, 5 with eviction", ("cap", "without")),
    ],
)
def test_start_up_line_tells_what_the_policy_does(harness, settings, said, unsaid):
    scheduler = harness(**settings).scheduler
    line = describe_policy(
        scheduler.kv_config, scheduler.vllm_config, scheduler.kv_cache_config
    )
    assert "\n" not in line and said in line
    assert not [word for word in unsaid if word in line]


def test_a_request_refused_on_arrival_leaves_nothing_behind(harness):
    h = harness()
    with pytest.raises(KVPolicyError, match="kv_budget"):
        h.add("bad", 300, 100, kv_budget="half")
    h.check_idle()
    h.add("good", 300, 100)
    h.run()
    assert set(h.finished) == {"good"}
    h.check_idle()


def test_abort_returns_everything_at_once(harness):
    h = harness()
    h.add("a", 300, 100)
    h.add("b", 300, 100)
    for _ in range(10):
        h.step()
    h.abort("a")
    h.abort("a")
    h.check_invariants()
    assert "a" not in h.scheduler.retentions
    h.run()
    h.check_idle()


def test_same_id_again_starts_clean(harness):
    h = harness()
    for _ in range(3):
        h.add("a", 300, 100)
        for _ in range(10):
            h.step()
        h.abort("a")
    h.add("a", 40, 5)
    output = h.step()
    assert not plan_of(output).new_requests["a"].tracked
    assert h.worker.evicted["a"] == 0
    h.run()
    h.check_idle()


def test_a_short_request_that_can_never_evict_is_not_tracked(harness):
    h = harness(min_tokens=256)
    h.add("short", 40, 100)
    assert h.scheduler.retentions == {}
    assert not h.scheduler.request_params["short"].tracked
    h.run()
    h.check_idle()


def test_only_requests_that_live_to_evict_are_tracked(harness):
    # Block 32, budget 64 of a 128-token prompt: due at once, but only in a step
    # after the prompt. With budget 100 it is due when 132 tokens are computed.
    h = harness()
    cases = {("now", 1): False, ("now", 2): True, ("later", 5): False}
    cases[("later", 6)] = True
    for (kind, new), tracked in cases.items():
        name = f"{kind}{new}"
        h.add(name, 128, new, kv_budget=0.5 if kind == "now" else 100)
        assert h.scheduler.request_params[name].tracked is tracked, name
    h.run()
    # "now2" lives for one step after its prompt, and evicts at the head of it.
    assert h.worker.num_evictions == 2
    h.check_idle()


def test_a_request_larger_than_the_pool_never_blocks_a_small_one(harness):
    # vLLM itself admits it only if the whole prompt fits; the small one must run.
    h = harness(num_blocks=33, budget=0.25, engine={"max_num_batched_tokens": 2048})
    h.add("fits", 1000, 100)
    h.add("tiny", 20, 5)
    h.run(limit=400)
    assert h.finished == {"fits", "tiny"}
    h.check_idle()


@pytest.mark.parametrize("steps_in_flight", [0, 1])
@pytest.mark.parametrize("base", ["prompt", "sequence"])
@pytest.mark.parametrize("num_blocks", [24, 64])
def test_random_traffic_loses_no_block_and_reads_no_foreign_slot(
    harness, num_blocks, base, steps_in_flight
):
    h = harness(
        num_blocks=num_blocks, budget_base=base, steps_in_flight=steps_in_flight
    )
    names = {0: "KeyformerScheduler", 1: "KeyformerAsyncScheduler"}
    assert type(h.scheduler).__name__ == names[steps_in_flight]
    drive_at_random(h, num_blocks)


@pytest.mark.parametrize("steps_in_flight", [0, 1])
@pytest.mark.parametrize("num_blocks", [24, 64])
def test_random_traffic_under_an_audit_frees_and_loses_nothing(
    harness, num_blocks, steps_in_flight
):
    """The worker asserts that attention finds every token, the harness that nobody
    hits a block with exchanged ones."""
    h = harness(
        num_blocks=num_blocks,
        steps_in_flight=steps_in_flight,
        audit=True,
        caching=True,
    )
    drive_at_random(h, num_blocks)
    assert h.worker.num_copies["cache"] > 20 and h.worker.num_adopted > 20


def drive_at_random(h: Harness, seed: int) -> None:
    rng = random.Random(seed)
    alive: list[str] = []
    for number in range(120):
        name = f"r{number}"
        new = rng.randint(1, 120)
        extra = rng.choice([{}, {}, {"kv_budget": 0.3}, {"kv_policy": "full"}])
        h.add(name, rng.randint(1, 500), new, **extra)
        alive.append(name)
        for _ in range(rng.randint(0, 25)):
            if h.scheduler.has_unfinished_requests():
                h.step()
        if rng.random() < 0.25:
            h.abort(rng.choice(alive))
    h.run(limit=20000)
    assert h.worker.num_evictions > 50
    h.check_idle()
