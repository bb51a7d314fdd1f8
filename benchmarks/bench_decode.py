# SPDX-License-Identifier: Apache-2.0
"""What do a prompt and a decode step cost with and without a KV policy?

All arms live in one process, each with its own engine, and take turns: one step of the
first, one of the second, and so on. So a machine that changes speed from minute to
minute changes it for all of them, and the ratio of the medians holds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import common
from engines import (
    ARM_SYNTAX,
    open_engine,
    parse_arm,
    random_prompt,
    scheduler_of,
)
from op_clock import EVICTION_OPS, OpClock

from keyformer_vllm.demo.model import default_model_dir

WARM_UP = 2
"""Decode steps that are not counted: the first evictions fall into them."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=default_model_dir())
    parser.add_argument(
        "--arm",
        dest="arms",
        action="append",
        help=f"{ARM_SYNTAX} (default: off, keyformer:0.5 and keyformer:0.25); "
        "the first arm is what the others are compared with",
    )
    parser.add_argument("--phase", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=4096, help="tokens")
    parser.add_argument(
        "--steps", type=int, default=64, help="decode steps timed in each arm"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="prompts timed in each arm (prefill)"
    )
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--max-batched-tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts")
    common.add_result_options(parser)
    return parser


class Arm:
    """One engine with its requests, and what its steps took."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.args = args
        self.seconds: list[float] = []
        self.clock = OpClock()
        blocks = -(-(args.prompt_len + args.steps + 64) // args.block_size)
        self.engine = open_engine(
            args.model,
            parse_arm(name),
            num_blocks=args.requests * blocks + 1,
            dtype=args.dtype,
            block_size=args.block_size,
            max_model_len=blocks * args.block_size,
            max_num_seqs=args.requests,
            max_num_batched_tokens=args.max_batched_tokens,
        )
        self.scheduler = scheduler_of(self.engine)
        self.vocab_size = self.engine.model_config.get_vocab_size()
        self.free_at_start = self.free_blocks()

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, request_id: str, new_tokens: int) -> None:
        from vllm import SamplingParams

        prompt = random_prompt(
            self.args.seed, request_id, self.args.prompt_len, self.vocab_size
        )
        sampling = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)

    def step(self) -> float:
        started = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - started

    def in_prompt_phase(self) -> bool:
        """Whether a request waits, or has prompt tokens left to compute."""
        running = self.scheduler.running
        return bool(self.scheduler.waiting) or any(
            request.num_computed_tokens < request.num_prompt_tokens
            for request in running
        )

    def finish_prompts(self) -> float:
        """Steps until every prompt is computed; returns what that took."""
        total = self.step()
        while self.in_prompt_phase():
            total += self.step()
        return total


def time_decode(arms: list[Arm], args: argparse.Namespace, show: Any) -> None:
    """Full batches that decode in turn; the first steps after the prompts are not
    counted, because the first eviction falls into them."""
    for arm in arms:
        for index in range(args.requests):
            # More tokens than are timed: the batch stays full.
            arm.add(str(index), args.steps + WARM_UP + 40)
        arm.finish_prompts()
        show.update()
    for number in range(args.steps + WARM_UP):
        for arm in arms:
            counted = number >= WARM_UP
            with arm.clock.watching() if counted else nullcontext():
                seconds = arm.step()
            if counted:
                arm.seconds.append(seconds)
        show.update()


def time_prefill(arms: list[Arm], args: argparse.Namespace, show: Any) -> None:
    """One prompt after the other, the arms in turn."""
    for index in range(args.rounds):
        for arm in arms:
            # With a single new token nothing could be evicted and nothing scores.
            arm.add(str(index), 40)
            with arm.clock.watching():
                arm.seconds.append(arm.finish_prompts())
            arm.engine.abort_request([str(index)])
            while arm.engine.has_unfinished_requests():
                arm.step()
        show.update()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time all arms; the first is what the others are compared with."""
    from tqdm import tqdm

    if args.phase == "prefill":
        args.requests = 1
    arms = [Arm(name, args) for name in args.arms]
    if args.phase == "decode":
        total, run = len(arms) + args.steps + WARM_UP, time_decode
    else:
        total, run = args.rounds, time_prefill
    with tqdm(total=total, file=sys.stderr, disable=None, leave=False) as show:
        run(arms, args, show)
    result = {
        "benchmark": "decode",
        "machine": common.describe_machine(),
        "settings": common.settings_of(args),
        "arms": [describe_arm(arm, arms[0]) for arm in arms],
    }
    common.say(format_arms(result["arms"]))
    return result


def describe_arm(arm: Arm, base: Arm) -> dict[str, Any]:
    total = sum(arm.seconds)
    return {
        "name": arm.name,
        "seconds": common.summarize(arm.seconds),
        "ratio": common.compare(arm.seconds, base.seconds),
        "samples": len(arm.seconds),
        "blocks": arm.free_at_start - arm.free_blocks(),
        "share_percent": {
            name: 100 * seconds / total
            for spent in arm.clock.seconds().values()
            for name, seconds in spent.items()
        },
    }


def format_arms(arms: list[dict[str, Any]]) -> str:
    columns = ("arm", "ms", "ratio", "min", "max", "blocks", *EVICTION_OPS)
    return common.format_table(
        columns,
        [
            (
                arm["name"],
                1e3 * arm["seconds"]["median"],
                *(arm["ratio"][name] for name in ("median", "min", "max")),
                arm["blocks"],
                *(arm["share_percent"].get(name) for name in EVICTION_OPS),
            )
            for arm in arms
        ],
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """The median of every arm against the first one's."""
    arms = result["arms"][::-1]
    with common.drawing(path, 8, 1.3 + 0.36 * len(arms)) as (_, (axes,)):
        axes.barh(
            [arm["name"] for arm in arms], [arm["ratio"]["median"] for arm in arms]
        )
        axes.axvline(1.0, color="black", linewidth=0.8)
        settings = result["settings"]
        axes.set_xlabel(f"time of {settings['phase']} against {arms[-1]['name']}")
        axes.set_title(
            f"{settings['requests']} x {settings['prompt_len']} tokens, "
            f"{settings['dtype']}"
        )


def main() -> None:
    args = build_parser().parse_args()
    args.arms = args.arms or ["off", "keyformer:0.5", "keyformer:0.25"]
    for text in args.arms:
        parse_arm(text)
    common.check_result_options(args)
    common.set_environment()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    common.write_result(args, measure(args), draw)


if __name__ == "__main__":
    sys.exit(common.run_main(main))
