# SPDX-License-Identifier: Apache-2.0
"""Scheduler and block manager under any order of events that hypothesis finds.

After each step, what must hold is worked out anew: from the lengths and budgets that
were asked for, and from the blocks that were held before. Cases: A02, A10, A11, A12,
A16, A32, A33, A35 of public reports on eviction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from keyformer_vllm.adapters.plan import plan_of
from tests.adapters.scheduler_harness import BLOCK_SIZE, Harness
from tests.invariants import find_strings

NUM_EXAMPLES = 80
NUM_STEPS = 10_000
"""Steps with work in them that each scheduler is taken through, at least."""

BUDGETS = [
    {},
    {},
    {"kv_budget": 0.2},
    {"kv_budget": 0.8},
    {"kv_budget": 100},
    {"kv_budget": 250},
    {"kv_budget": 1.0},
    {"kv_policy": "full"},
    {"kv_policy": "streaming", "kv_budget": 0.3},
]
"""What a request asks for on top of the server's settings."""

REQUESTS = st.tuples(
    # Short prompts with long answers outgrow the pool while they run.
    st.one_of(st.integers(1, 200), st.sampled_from([1, 31, 32, 33, 65, 127])),
    st.one_of(st.integers(1, 120), st.sampled_from([1, 2, 200, 300])),
    st.sampled_from(BUDGETS),
    st.sampled_from([1, 1, 1, 4]),
)
"""Length of the prompt, most tokens of the answer, settings, and the token that the
prompt repeats: most prompts begin alike."""


class WatchedHarness(Harness):
    """A harness that knows, without asking the scheduler, what has to come."""

    def __init__(self, model: Any, num_blocks: int, **policy: Any) -> None:
        super().__init__(model, num_blocks, **policy)
        self.policy = policy
        self.tally: Counter[str] = Counter()
        self.asked: dict[str, tuple[Any, dict[str, Any]]] = {}
        self.aborted: set[str] = set()
        self.prompt_end: dict[str, int] = {}
        """Of a request that was admitted: the tokens to compute before it decodes."""
        self.null_blocks: dict[str, int] = {}

    def add(
        self, name: str, prompt: int | Sequence[int], new: int, **extra: Any
    ) -> Any:
        request = super().add(name, prompt, new, **extra)
        self.asked[name] = request, extra
        self.aborted.discard(name)
        return request

    def abort(self, name: str) -> None:
        super().abort(name)
        if name not in self.finished:
            self.aborted.add(name)
            self.tally["FINISHED_ABORTED"] += 1
        self.prompt_end.pop(name, None)
        self.null_blocks.pop(name, None)
        self.check_invariants()
        self.check_forgotten()

    def step(self) -> Any:
        requests = self.scheduler.requests
        num_tokens = {name: request.num_tokens for name, request in requests.items()}
        before = {
            request.request_id: (
                request.num_computed_tokens,
                [b.block_id for b in self.blocks_of(request.request_id)],
            )
            for request in self.scheduler.running
        }
        output = super().step()
        plan = plan_of(output)
        preempted = output.preempted_req_ids or set()
        assert set(plan.evictions) <= set(before)
        for name, (computed, held) in before.items():
            evicted = self.null_blocks.get(name, 0)
            due = self.blocks_due(name, computed)
            assert due >= evicted
            self.tally["due and preempted"] += due > evicted and name in preempted
            assert (name in plan.evictions) == (due > evicted and name not in preempted)
            if name in plan.evictions:
                self.check_entry(name, plan.evictions[name], computed, held[evicted:])
                self.check_freed(output, held[evicted:due])
        for name in preempted:
            self.prompt_end.pop(name, None)
            self.null_blocks.pop(name, None)
        started = {new.req_id for new in output.scheduled_new_reqs}
        for name in started | output.scheduled_cached_reqs.resumed_req_ids:
            self.prompt_end[name] = num_tokens[name]
        for name, blocks in self.scheduler.kv_manager.req_to_blocks.items():
            num_null = sum(block.is_null for block in blocks)
            assert num_null >= self.null_blocks.get(name, 0), "the null prefix shrank"
            assert num_null == 0 or name in before, "null blocks before any step"
            self.null_blocks[name] = num_null
        self.check_forgotten()
        self.tally["steps"] += output.total_num_scheduled_tokens > 0
        self.tally["preemptions"] += len(preempted)
        self.tally["evictions"] += len(plan.evictions)
        self.tally["taken as they are"] += sum(map(len, plan.hits.values()))
        self.tally["copied for a hit"] += len(plan.hit_copies)
        self.tally["copied for the cache"] += len(plan.cache_copies)
        return output

    def blocks_due(self, name: str, computed: int) -> int:
        """E of a request at the head of a step, from what was asked for alone."""
        request, extra = self.asked[name]
        settings = {"kv_budget": self.policy["budget"], **extra}
        budget = settings["kv_budget"]
        if settings.get("kv_policy") == "full" or budget == 1.0:
            return 0

        def excess(num_tokens: int) -> int:
            share = budget
            if isinstance(budget, float):
                in_prompt = self.policy["budget_base"] == "prompt"
                base = request.num_prompt_tokens if in_prompt else num_tokens
                share = round(100 * budget) * base // 100
            return num_tokens - max(share, self.policy["min_tokens"])

        # The last token is sampled and never computed: the last step starts two
        # tokens before the end. Who has nothing to give up by then never evicts.
        last_head = request.num_prompt_tokens + request.max_tokens - 2
        in_prompt_phase = computed < self.prompt_end.get(name, computed + 1)
        if in_prompt_phase or request.max_tokens < 2 or excess(last_head) < BLOCK_SIZE:
            return 0
        return max(0, excess(computed)) // BLOCK_SIZE

    def check_entry(self, name: str, entry: Any, computed: int, held: Any) -> None:
        """The plan, the arithmetic and the manager's blocks say the same."""
        due = self.blocks_due(name, computed)
        freed = due - self.null_blocks.get(name, 0)
        assert entry.block_ids == held
        assert entry.counts.evicted_blocks == due
        assert entry.counts.num_evict == freed * BLOCK_SIZE
        assert entry.counts.kv_len == computed - due * BLOCK_SIZE
        if name in self.scheduler.requests:
            now = [block.block_id for block in self.blocks_of(name)]
            assert now[: due + len(held) - freed] == [0] * due + held[freed:]

    def check_freed(self, output: Any, freed: list[int]) -> None:
        """Blocks that were given up are free, or with whom the step gave them to."""
        queue = self.pool.free_block_queue
        free = {block.block_id for block in queue.get_all_free_blocks()}
        given = [new.block_ids for new in output.scheduled_new_reqs]
        given += filter(None, output.scheduled_cached_reqs.new_block_ids)
        handed_out = {block for blocks in given for block in blocks[0]}
        assert set(freed) <= free | handed_out

    def check_forgotten(self) -> None:
        """Nobody remembers a request that has ended, nor holds blocks for it."""
        scheduler = self.scheduler
        for table in (
            scheduler.requests,
            scheduler.retentions,
            scheduler.request_params,
            scheduler.evicted_blocks,
            scheduler.kv_manager.req_to_blocks,
        ):
            assert not set(table) & (self.aborted | self.finished)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests that come, stop and go in a pool that is too small for them."""

    def __init__(self, model: Any, steps_in_flight: int, total: Counter[str]) -> None:
        super().__init__()
        self.model = model
        self.steps_in_flight = steps_in_flight
        self.total = total
        self.harness: WatchedHarness | None = None
        self.failed = False

    @initialize(
        num_blocks=st.integers(6, 16),
        caching=st.sampled_from([True, True, False]),
        chunk=st.sampled_from([32, 100, 256]),
        policy=st.sampled_from(["keyformer", "h2o", "streaming", "window"]),
        budget=st.sampled_from([0.3, 0.5, 0.9, 100]),
        base=st.sampled_from(["prompt", "sequence"]),
        min_tokens=st.sampled_from([1, 100]),
    )
    def start(self, num_blocks, caching, chunk, policy, budget, base, min_tokens):
        self.harness = WatchedHarness(
            self.model,
            num_blocks,
            caching=caching,
            policy=policy,
            budget=budget,
            budget_base=base,
            min_tokens=min_tokens,
            steps_in_flight=self.steps_in_flight,
            engine={"max_num_batched_tokens": chunk, "max_num_seqs": 8},
        )
        self.names = 0
        # Alone and in full, a request must fit: vLLM would wait for ever.
        self.longest = (num_blocks - 2) * BLOCK_SIZE

    def some(self, data: Any) -> list[str]:
        alive = sorted(self.harness.scheduler.requests)
        return data.draw(st.lists(st.sampled_from(alive), min_size=1, unique=True))

    def anyone(self) -> bool:
        return self.harness is not None and bool(self.harness.scheduler.requests)

    @rule(requests=st.lists(REQUESTS, min_size=2, max_size=6))
    def add(self, requests):
        for prompt, new, extra, token in requests:
            self.add_tokens([token] * prompt, new, extra)

    @rule(data=st.data(), more=st.integers(1, 60), new=st.integers(1, 60))
    def continue_chat(self, data, more, new):
        """The next turn: all tokens of an earlier one, and a question."""
        if not self.harness.asked:
            return
        request, extra = data.draw(st.sampled_from(list(self.harness.asked.values())))
        question = [data.draw(st.sampled_from([1, 5]))] * more
        self.add_tokens([*request.all_token_ids, *question], new, extra)

    def add_tokens(self, prompt: list[int], new: int, extra: Any) -> None:
        self.names += 1
        prompt = prompt[: self.longest - 1]
        new = min(new, self.longest - len(prompt))
        self.harness.add(f"r{self.names}", prompt, new, **extra)

    @rule(count=st.integers(1, 25))
    def step(self, count):
        self.failed = True
        for _ in range(count):
            self.harness.step()
        self.failed = False

    @precondition(anyone)
    @rule(data=st.data(), again=st.booleans())
    def abort(self, data, again):
        for name in self.some(data):
            self.harness.abort(name)
            # A client may send another request under the same id before the next
            # step. vLLM itself would give it the tokens of a step under way.
            if again and not self.steps_in_flight:
                self.harness.add(name, 20, min(40, self.longest - 20))

    @precondition(anyone)
    @rule(data=st.data())
    def stop(self, data):
        self.harness.stopping.update(self.some(data))

    @rule()
    def preempt_all(self):
        assert self.harness.scheduler.reset_prefix_cache(reset_running_requests=True)

    @rule(state=st.sampled_from(["PAUSED_NEW", "PAUSED_ALL"]), count=st.integers(1, 4))
    def pause(self, state, count):
        self.set_pause(state)
        self.step(count)
        self.set_pause("UNPAUSED")

    def set_pause(self, state: str) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self.harness.scheduler.set_pause_state(PauseState[state])

    def teardown(self):
        harness = self.harness
        if harness is None or self.failed:
            return
        self.set_pause("UNPAUSED")
        harness.run(limit=50_000)
        harness.check_idle()
        worker = harness.worker
        assert not (worker.rows or worker.evicted or worker.epoch or worker.known)
        names = set(harness.asked)
        assert harness.finished | harness.aborted == names
        assert not find_strings({"scheduler": harness.scheduler}, names)
        for name in harness.finished:
            request, _ = harness.asked[name]
            self.total[request.status.name] += 1
            if request.status.name == "FINISHED_LENGTH_CAPPED":
                assert request.num_output_tokens == request.max_tokens
        self.total += harness.tally


@pytest.mark.parametrize("steps_in_flight", [0, 1], ids=["sync", "async"])
def test_any_order_of_events_keeps_every_block_accounted_for(
    tiny_model, steps_in_flight
):
    model, total = tiny_model("llama-4-2"), Counter()
    # How much work the same number of events makes depends on how they are drawn; other
    # lengths draw others.
    for num_events in range(50, 100, 5):
        run_state_machine_as_test(
            lambda: SchedulerMachine(model, steps_in_flight, total),
            settings=settings(
                max_examples=NUM_EXAMPLES,
                stateful_step_count=num_events,
                derandomize=True,
                database=None,
                deadline=None,
                # Shrinking a failure takes minutes; its steps are short to read.
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
        if total["steps"] >= NUM_STEPS:
            break
    assert total["steps"] >= NUM_STEPS
    assert total["preemptions"] >= 50, total
    assert total["evictions"] >= 100, total
    for kind in ("taken as they are", "copied for a hit", "copied for the cache"):
        assert total[kind] >= 50, total
    for ending in ("STOPPED", "LENGTH_CAPPED", "ABORTED"):
        assert total[f"FINISHED_{ending}"] >= 10, total


@pytest.mark.parametrize(("num_blocks", "new"), [(12, 256), (16, 300)])
@pytest.mark.parametrize("steps_in_flight", [0, 1], ids=["sync", "async"])
def test_preempted_in_the_step_of_its_eviction(
    tiny_model, num_blocks, new, steps_in_flight
):
    """Several need a block in the step in which the last one gives up one."""
    h = WatchedHarness(
        tiny_model("llama-4-2"),
        num_blocks,
        policy="keyformer",
        budget=0.5,
        budget_base="prompt",
        min_tokens=1,
        steps_in_flight=steps_in_flight,
    )
    full, evicting = {"kv_policy": "full"}, {"kv_budget": 128}
    for number, extra in enumerate([full, evicting, full, evicting, evicting]):
        h.add(f"r{number}", 64, new, **extra)
    h.run()
    h.check_idle()
    assert h.tally["due and preempted"] == 1, h.tally
