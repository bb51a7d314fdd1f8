# SPDX-License-Identifier: Apache-2.0
"""One arm of a throughput run: an engine in a process of its own, stepped from here.

A process for each arm keeps the arms apart: only so is the one without the plugin
stock vLLM, and what an arm holds is gone when its process ends. The caller hands out
the turns, and each arm's clock counts the time of its own steps only.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import common
from engines import open_engine, parse_arm, scheduler_of
from op_clock import OpClock

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

STOCK = "stock"
"""An arm whose process does not load the plugin at all."""

PREFILL, DECODE = "prefill", "decode"
"""Phases of a step: with prompt tokens, and without."""

_WARM_UP_PROMPT, _WARM_UP_TOKENS = 512, 40
"""Of the request before the clock starts; long enough for an eviction."""

_END_SECONDS = 30.0


@dataclass(frozen=True)
class ArmSpec:
    """What an arm's process has to know.

    Args:
        name: as it was spelled; `stock` loads no plugin.
        model: model folder.
        num_blocks: blocks in the pool, the null block among them.
        policy_defaults: policy settings that the name may override.
        engine: further arguments of `vllm.LLM`.
        profile: whether to time the eviction ops.
    """

    name: str
    model: str
    num_blocks: int
    engine: dict[str, Any]
    policy_defaults: dict[str, Any] = field(default_factory=dict)
    profile: bool = False

    def policy(self) -> dict[str, Any] | None:
        """Settings of the policy; None for stock vLLM.

        Raises:
            UsageError: for a name that `parse_arm` does not know.
        """
        given = None if self.name == STOCK else parse_arm(self.name)
        return None if given is None else {**self.policy_defaults, **given}


@dataclass
class Round:
    """What one pass over the requests took; times are those of the arm's own clock.

    Args:
        seconds: of all steps.
        cpu_seconds: processor time of all steps, of all threads.
        prefill_seconds: of the steps that computed prompt tokens.
        token_times: for each request, when each of its tokens came out.
        running: after each scheduling, the requests that run.
        saturated: of those, the numbers in steps without prompt tokens while others
            waited: there was room for their tokens, so they waited for blocks.
        used_blocks: the most blocks held after a scheduling.
        evicted_tokens: per KV head and layer.
        op_seconds: phase to name of the op to its seconds.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    prefill_seconds: float = 0.0
    steps: int = 0
    prefill_steps: int = 0
    token_times: dict[str, list[float]] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    saturated: list[int] = field(default_factory=list)
    used_blocks: int = 0
    preemptions: int = 0
    evicted_tokens: int = 0
    freed_blocks: int = 0
    op_seconds: dict[str, dict[str, float]] = field(default_factory=dict)


class MeasuredEngine:
    """The engine of an arm with its requests; lives in the arm's process."""

    def __init__(self, spec: ArmSpec) -> None:
        policy = spec.policy()
        self.engine = open_engine(
            spec.model, policy, num_blocks=spec.num_blocks, **spec.engine
        )
        self.scheduler = scheduler_of(self.engine)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.pool_blocks = self.pool.get_num_free_blocks()
        self.profile = spec.profile
        self.evicts = policy is not None
        self.round = Round()
        self._clock = self._new_clock()
        self._has_prefill = False
        self._awaited: bool | None = None
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._watched_schedule
        self._update = self.scheduler.update_from_output
        self.scheduler.update_from_output = self._watched_update
        self._prompt_lens: dict[str, int] = {}
        self._tokens = 0
        self._total_tokens = 0

    def facts(self) -> dict[str, Any]:
        """What is fixed before the first request."""
        config = self.scheduler.vllm_config
        tensors = self.scheduler.kv_cache_config.kv_cache_tensors
        return {
            "vocab_size": config.model_config.get_vocab_size(),
            "pool_blocks": self.pool_blocks,
            "pool_mib": sum(tensor.size for tensor in tensors) / 2**20,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "plugin": "keyformer_vllm.plugin" in sys.modules,
        }

    def warm_up(self, prompt: list[int]) -> None:
        """One request that is not counted."""
        tokens = min(_WARM_UP_TOKENS, self._longest() - 1)
        self.queue([prompt[: min(_WARM_UP_PROMPT, self._longest() - tokens)]], tokens)
        while self.engine.has_unfinished_requests():
            self.step()

    def queue(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Start a round: hand in all requests."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.round = Round()
        self._clock = self._new_clock()
        self._tokens = 0
        self._total_tokens = sum(map(len, prompts)) + new_tokens * len(prompts)
        self._prompt_lens = {
            str(index): len(prompt) for index, prompt in enumerate(prompts)
        }
        for index, prompt in enumerate(prompts):
            self.engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling)

    def step(self) -> tuple[int, int, float]:
        """One step of the engine.

        Returns:
            Tokens done so far, of how many in this round, and the arm's clock.
        """
        now = self.round
        self._has_prefill, self._awaited = False, None
        with self._clock.watching() if self.profile else nullcontext():
            started, cpu_started = time.perf_counter(), time.process_time()
            outputs = self.engine.step()
            seconds = time.perf_counter() - started
            now.cpu_seconds += time.process_time() - cpu_started
        now.seconds += seconds
        now.steps += 1
        if self._has_prefill if self._awaited is None else self._awaited:
            now.prefill_seconds += seconds
            now.prefill_steps += 1
        for output in outputs:
            times = now.token_times.setdefault(output.request_id, [])
            number = sum(len(delta.token_ids) for delta in output.outputs)
            if number and not times:
                self._tokens += self._prompt_lens[output.request_id]
            times.extend([now.seconds] * number)
            self._tokens += number
        return self._tokens, self._total_tokens, now.seconds

    def finish(self) -> Round:
        """End a round: the step with which the workers hear of the last requests.

        Raises:
            RuntimeError: if a block is still held; the next round would have fewer.
        """
        self.engine.step()
        held = self.pool_blocks - self.pool.get_num_free_blocks()
        if held:
            raise RuntimeError(f"{held} blocks are held after the last request")
        self.round.op_seconds = {
            phase: dict(spent) for phase, spent in self._clock.seconds().items()
        }
        return self.round

    def _new_clock(self) -> OpClock:
        return OpClock(lambda: PREFILL if self._has_prefill else DECODE)

    def _watched_update(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        # Under asynchronous scheduling a step waits for the batch of an earlier one.
        self._awaited = _computes_prompts(output)
        return self._update(output, *args, **kwargs)

    def _watched_schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        now = self.round
        scheduled = output.num_scheduled_tokens
        self._has_prefill = _computes_prompts(output)
        if scheduled:
            running = len(self.scheduler.running)
            now.running.append(running)
            if self.scheduler.waiting and not self._has_prefill:
                now.saturated.append(running)
        used = self.pool_blocks - self.pool.get_num_free_blocks()
        now.used_blocks = max(now.used_blocks, used)
        now.preemptions += len(output.preempted_req_ids or ())
        if self.evicts:
            self._count_evictions(output)
        return output

    def _count_evictions(self, output: Any) -> None:
        from keyformer_vllm.adapters.plan import plan_of

        block_size = self.scheduler.block_size
        for entry in plan_of(output).evictions.values():
            self.round.evicted_tokens += entry.counts.num_evict
            self.round.freed_blocks += entry.counts.num_evict // block_size

    def _longest(self) -> int:
        length: int = self.scheduler.max_model_len
        return length


class ServedArm:
    """The caller's end of an arm; use it as a context manager.

    The process starts at once and gets ready by itself: `ready` waits for it, so that
    several can start side by side.
    """

    def __init__(self, spec: ArmSpec) -> None:
        self.name = spec.name
        self.facts: dict[str, Any] = {}
        self.rounds: list[Round] = []
        self.done = self.total = 0
        self.seconds = 0.0
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=_serve, args=(theirs, spec), name=spec.name, daemon=True
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> ServedArm:
        return self

    def __exit__(self, *_: object) -> None:
        """Closing the pipe tells the process to end."""
        self._connection.close()
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def ready(self) -> None:
        """Wait until the engine is there.

        Raises:
            RuntimeError: with what happened in the process.
        """
        self.facts = self._answer()

    def warm_up(self, prompt: list[int]) -> None:
        self._call("warm_up", prompt)

    def queue(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Start a round: hand in all requests."""
        self._call("queue", prompts, new_tokens)
        self.done, self.total, self.seconds = 0, 1, 0.0

    @property
    def busy(self) -> bool:
        """Whether tokens of this round are still to come."""
        return self.done < self.total

    @property
    def share(self) -> float:
        """Share of the round's tokens, prompt and new, that is done."""
        return self.done / self.total

    def step(self) -> int:
        """One step; returns the tokens that it finished."""
        before = self.done
        self.done, self.total, self.seconds = self._call("step")
        return self.done - before

    def finish(self) -> None:
        """End a round and note it in `rounds`."""
        self.rounds.append(self._call("finish"))

    def _call(self, method: str, *args: Any) -> Any:
        self._connection.send((method, args))
        return self._answer()

    def _answer(self) -> Any:
        try:
            kind, value = self._connection.recv()
        except EOFError:
            self._process.join(_END_SECONDS)
            status = self._process.exitcode
            raise RuntimeError(
                f"arm {self.name}: its process ended with status {status}"
            ) from None
        if kind == "error":
            raise RuntimeError(f"arm {self.name} failed:\n{value}")
        return value


def one_by_one(arms: list[ServedArm]) -> Iterator[int]:
    """Step each arm until it is through; yields the tokens of each step.

    For a GPU, which the arms share: steps of several at a time would share its
    bandwidth too, and it changes its speed less than a shared CPU does.
    """
    for arm in arms:
        while arm.busy:
            yield arm.step()


def take_turns(arms: list[ServedArm]) -> Iterator[int]:
    """Step the arms until all are through; yields the tokens of each step.

    The next step is that of the arm with the smallest share done. So all of them end
    at about the same time and see the same good and bad minutes of the machine, even
    if one needs twice the time of another. Lots decide between equal shares: who runs
    behind whom matters by some percent, because caches are left as the other used them.
    """
    lots = random.Random(0)
    while True:
        busy = [arm for arm in arms if arm.busy]
        if not busy:
            return
        yield min(busy, key=lambda arm: (arm.share, lots.random())).step()


def _computes_prompts(output: Any) -> bool:
    """Whether a batch holds more than one token of a request."""
    scheduled = output.num_scheduled_tokens
    return sum(scheduled.values()) > len(scheduled)


def _serve(connection: Connection, spec: ArmSpec) -> None:
    """Body of an arm's process: answers until the caller closes the pipe."""
    os.dup2(2, 1)  # the caller's stdout is kept for the result
    common.set_environment()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if spec.name == STOCK:
        os.environ["VLLM_PLUGINS"] = ""
    try:
        engine = MeasuredEngine(spec)
        connection.send(("value", engine.facts()))
        while True:
            method, args = connection.recv()
            connection.send(("value", getattr(engine, method)(*args)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the caller is gone, or on its way out
    except Exception:
        connection.send(("error", traceback.format_exc()))
    finally:
        connection.close()
