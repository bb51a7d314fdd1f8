# SPDX-License-Identifier: Apache-2.0
"""What should eviction give a GPU server? Predicted, not measured.

Continuous batching as vLLM does it, step by step, in blocks: a request is admitted when
the blocks of its whole prompt are free, prompts are cut into chunks, the newest request
is preempted when no block is left and computes everything again. A step takes as long
as the weights and the host, or its prompt tokens, and then as long as reading the keys
and values that it attends to. Evictions come from `predict_gpu.py`. The figures are to
be held against `bench_crossover.py` on a GPU, and replaced by it.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import common
import predict_gpu
from predict_gpu import Gpu, Model, attention_bytes, kv_bytes, score_work

STEP_TOKENS = 8192  # vLLM's max_num_batched_tokens of `vllm serve` on such a GPU


@dataclass(frozen=True)
class Load:
    """Requests that all arrive at once; `pool` in tokens."""

    name: str
    num_requests: int
    prompt: int
    output: int
    pool: int
    max_num_seqs: int = 256


@dataclass(frozen=True)
class Arm:
    """`kept` of the prompt's tokens stay; 1.0 is stock vLLM."""

    name: str
    kept: float


LOADS = (
    Load("ample, 64 x 2,048 + 128", 64, 2048, 128, 10**6),
    Load("tight, 192 x 2,048 + 1,024", 192, 2048, 1024, 150_000),
    Load("prefill-bound, 192 x 4,096 + 256", 192, 4096, 256, 150_000),
)
ARMS = (Arm("stock", 1.0), Arm("0.5", 0.5), Arm("0.25", 0.25))


@dataclass(frozen=True)
class Times:
    """Of a step, in seconds.

    Args:
        fixed: weights, launches and host: a decode step without keys and values.
        prompt_token: what a token of a prompt adds, its scores included.
        resident_token: what a token in the cache adds to a step that attends to it.
    """

    fixed: float
    prompt_token: float
    resident_token: float


def step_times(gpu: Gpu, model: Model, load: Load, arm: Arm, step: float) -> Times:
    """`step` is stock's decode step with 64 requests of 2,048 tokens, in seconds."""
    stock_token = gpu.bytes_time(kv_bytes(model, 1) * model.num_layers)
    fixed = step - 64 * 2048 * stock_token
    if arm.kept == 1.0:
        return Times(fixed, 1 / model.prefill_rate, stock_token)
    weights = load.prompt * load.prompt / 2
    scoring = sum(
        max(gpu.bytes_time(one.num_bytes), gpu.issue_time(one.instructions))
        for one in score_work(model, kv_bytes(model, load.prompt) / 2, weights)
    )
    many = 1 << 20  # ranges are counted whole
    return Times(
        fixed,
        1 / model.prefill_rate + scoring / load.prompt,
        gpu.bytes_time(attention_bytes(model, many) * model.num_layers / many),
    )


class Request:
    """A running or waiting request: tokens to compute, held and generated."""

    def __init__(self, prompt: int) -> None:
        self.to_compute = prompt
        self.held = 0
        self.generated = 0

    def preempt(self, prompt: int) -> None:
        """All of it has to be computed again."""
        self.to_compute, self.held = prompt + self.generated, 0


class Server:
    """One arm under one load."""

    def __init__(self, load: Load, arm: Arm, block_size: int) -> None:
        self.load, self.block_size = load, block_size
        self.budget = int(load.prompt * arm.kept) if arm.kept < 1.0 else None
        self.free = load.pool // block_size
        self.waiting = deque(Request(load.prompt) for _ in range(load.num_requests))
        self.running: list[Request] = []
        self.preempted = 0
        self.num_scheduled = self.peak_running = 0

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def grow(self, request: Request, tokens: int) -> bool:
        """Hold more tokens, at the cost of newer requests if need be."""
        needed = self.blocks(request.held + tokens) - self.blocks(request.held)
        while needed > self.free:
            newest = self.running.pop()
            self.free += self.blocks(newest.held)
            newest.preempt(self.load.prompt)
            self.waiting.appendleft(newest)
            self.preempted += 1
            if newest is request:
                return False
        self.free -= needed
        request.held += tokens
        return True

    def evict(self, request: Request) -> None:
        """Down to the budget, once a block of tokens is beyond it."""
        budget = self.budget
        if budget is None or request.held < budget + self.block_size:
            return
        self.free += self.blocks(request.held) - self.blocks(budget)
        request.held = budget

    def schedule(self) -> tuple[int, int]:
        """Run one step; prompt tokens computed, tokens attended to by decoding."""
        left, prompt_tokens, attended = STEP_TOKENS, 0, 0
        chosen: list[tuple[Request, int]] = []
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted by an older one
            tokens = min(request.to_compute or 1, left)
            if tokens and self.grow(request, tokens):
                chosen.append((request, tokens))
                left -= tokens
        preempted_now = self.preempted
        while self.waiting and left and len(self.running) < self.load.max_num_seqs:
            request = self.waiting[0]
            tokens = min(request.to_compute, left)
            if self.blocks(request.to_compute) > self.free:
                break
            self.running.append(self.waiting.popleft())
            assert self.grow(request, tokens) and self.preempted == preempted_now
            chosen.append((request, tokens))
            left -= tokens
        self.num_scheduled = len(self.running)
        self.peak_running = max(self.peak_running, self.num_scheduled)
        for request, tokens in chosen:
            if request not in self.running:
                continue
            if request.to_compute:
                prompt_tokens += tokens
                request.to_compute -= tokens
                if request.to_compute:
                    continue
            else:
                attended += request.held
            request.generated += 1
            if request.generated == self.load.output:
                self.running.remove(request)
                self.free += self.blocks(request.held)
            else:
                self.evict(request)
        return prompt_tokens, attended


@dataclass(frozen=True)
class Served:
    """One arm under one load; rates in output tokens per second of the whole run."""

    load: str
    arm: str
    tokens_per_second: float
    against_stock: float
    decode_step: float
    decode_against_stock: float
    peak_running: int
    mean_running: float
    preempted: int


class Run(NamedTuple):
    """Of one arm: seconds in all and per step that only decodes, and requests."""

    seconds: float
    decode_step: float
    peak_running: int
    mean_running: float  # over time
    preempted: int


def serve(load: Load, arm: Arm, times: Times, block_size: int) -> Run:
    server = Server(load, arm, block_size)
    seconds, decode_seconds, decode_steps, running = 0.0, 0.0, 0, 0.0
    while server.waiting or server.running:
        prompt_tokens, attended = server.schedule()
        own = max(times.fixed, prompt_tokens * times.prompt_token)
        own += attended * times.resident_token
        seconds += own
        running += own * server.num_scheduled
        if not prompt_tokens:
            decode_seconds += own
            decode_steps += 1
    return Run(
        seconds,
        decode_seconds / max(1, decode_steps),
        server.peak_running,
        running / seconds,
        server.preempted,
    )


def predict_served(gpu: Gpu, model: Model, step: float) -> list[Served]:
    """All loads with all arms."""
    made: list[Served] = []
    for load in LOADS:
        stock: Served | None = None
        for arm in ARMS:
            times = step_times(gpu, model, load, arm, step)
            run = serve(load, arm, times, model.block_size)
            rate = load.num_requests * load.output / run.seconds
            one = Served(
                load.name,
                arm.name,
                rate,
                rate / stock.tokens_per_second if stock else 1.0,
                run.decode_step,
                run.decode_step / stock.decode_step if stock else 1.0,
                run.peak_running,
                run.mean_running,
                run.preempted,
            )
            stock = stock or one
            made.append(one)
    return made


def format_served(served: list[Served]) -> str:
    columns = (
        *("Load", "Arm", "tok/s", "x", "Decode step, ms", "x"),
        *("Running, peak", "Mean", "Preempted"),
    )
    return common.format_table(
        columns,
        [
            (
                one.load,
                one.arm,
                round(one.tokens_per_second),
                one.against_stock,
                one.decode_step * 1e3,
                one.decode_against_stock,
                one.peak_running,
                one.mean_running,
                one.preempted,
            )
            for one in served
        ],
    )


def main() -> None:
    step = "stock's decode step with 64 requests of 2,048 tokens"
    predict_gpu.run(
        predict_gpu.build_parser(__doc__, step), predict_served, format_served
    )


if __name__ == "__main__":
    sys.exit(common.run_main(main))
