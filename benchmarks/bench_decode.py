# SPDX-License-Identifier: Apache-2.0
"""What do a prompt and a decode step cost with and without a KV policy?

All arms live in one process, each with its own engine, and take turns: one step of the
first, one of the second, and so on. So a machine that changes speed from minute to
minute changes it for all of them, and the ratio of the medians holds.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keyformer_vllm.config import parse_budget
from keyformer_vllm.demo.model import default_model_dir

EVICTION_OPS = (
    "paged_attention_scored",
    "score_keys",
    "reset_slots",
    "select_keep",
    "compact_kv",
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=default_model_dir())
    parser.add_argument(
        "--arm",
        dest="arms",
        action="append",
        help="off, or POLICY:BUDGET[:SETTING=VALUE,...], for example "
        "keyformer:0.5:score_queries=stride:4 (default: off, keyformer:0.5 and "
        "keyformer:0.25); the first arm is what the others are compared with",
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
    parser.add_argument("--output", type=Path, help="JSON file; stdout gets it too")
    return parser


def parse_arm(text: str) -> dict[str, Any] | None:
    """Settings of an arm; None for stock vLLM.

    Raises:
        ValueError: when it is not spelled as the help says.
    """
    if text == "off":
        return None
    policy, _, rest = text.partition(":")
    budget, _, settings = rest.partition(":")
    result: dict[str, Any] = {"policy": policy, "budget": parse_budget(budget)}
    for setting in filter(None, settings.split(",")):
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"arm {text!r}: {setting!r} is not SETTING=VALUE")
        try:
            result[name] = json.loads(value)
        except json.JSONDecodeError:
            result[name] = value
    return result


@contextmanager
def timed_ops(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the wall time of every eviction op that runs inside the block."""
    from keyformer_vllm import ops

    originals = {name: getattr(ops, name) for name in EVICTION_OPS}

    def timed(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return op(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - started

        return call

    for name, op in originals.items():
        setattr(ops, name, timed(name, op))
    try:
        yield
    finally:
        for name, op in originals.items():
            setattr(ops, name, op)


class Arm:
    """One engine with its requests, and what its steps took."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        from vllm import LLM

        self.name = name
        self.args = args
        self.seconds: list[float] = []
        self.op_seconds: dict[str, float] = defaultdict(float)
        settings = parse_arm(name)
        blocks = -(-(args.prompt_len + args.steps + 64) // args.block_size)
        extra: dict[str, Any] = {}
        if settings is not None:
            extra["additional_config"] = {"keyformer": settings}
        llm = LLM(
            model=str(args.model),
            dtype=args.dtype,
            block_size=args.block_size,
            num_gpu_blocks_override=args.requests * blocks + 1,
            max_model_len=blocks * args.block_size,
            max_num_seqs=args.requests,
            max_num_batched_tokens=args.max_batched_tokens,
            enable_prefix_caching=False,
            enforce_eager=True,
            skip_tokenizer_init=True,
            **extra,
        )
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.vocab_size = self.engine.model_config.get_vocab_size()
        self.free_at_start = self.free_blocks()

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, request_id: str, new_tokens: int) -> None:
        from vllm import SamplingParams

        draw = random.Random(f"{self.args.seed} {request_id}")
        prompt = [
            draw.randrange(3, self.vocab_size) for _ in range(self.args.prompt_len)
        ]
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
    warm_up = 2
    for arm in arms:
        for index in range(args.requests):
            # More tokens than are timed: the batch stays full.
            arm.add(str(index), args.steps + warm_up + 40)
        arm.finish_prompts()
        show.update()
    for number in range(args.steps + warm_up):
        for arm in arms:
            counted = number >= warm_up
            with timed_ops(arm.op_seconds if counted else defaultdict(float)):
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
            with timed_ops(arm.op_seconds):
                arm.seconds.append(arm.finish_prompts())
            arm.engine.abort_request([str(index)])
            while arm.engine.has_unfinished_requests():
                arm.step()
        show.update()


def summarise(arms: list[Arm]) -> list[dict[str, Any]]:
    base = statistics.median(arms[0].seconds)
    rows = []
    for arm in arms:
        median = statistics.median(arm.seconds)
        total = sum(arm.seconds)
        rows.append(
            {
                "arm": arm.name,
                "median_ms": round(1e3 * median, 2),
                "ratio": round(median / base, 3),
                "mean_ratio": round(total / sum(arms[0].seconds), 3),
                "min_ms": round(1e3 * min(arm.seconds), 2),
                "max_ms": round(1e3 * max(arm.seconds), 2),
                "samples": len(arm.seconds),
                "blocks": arm.free_at_start - arm.free_blocks(),
                "share_percent": {
                    name: round(100 * seconds / total, 2)
                    for name, seconds in arm.op_seconds.items()
                },
            }
        )
    return rows


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    args.arms = args.arms or ["off", "keyformer:0.5", "keyformer:0.25"]
    for text in args.arms:
        try:
            parse_arm(text)
        except ValueError as error:
            parser.error(str(error))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from tqdm import tqdm

    if args.phase == "prefill":
        args.requests = 1
    arms = [Arm(name, args) for name in args.arms]
    if args.phase == "decode":
        total, run = len(arms) + args.steps + 2, time_decode
    else:
        total, run = args.rounds, time_prefill
    with tqdm(total=total, file=sys.stderr) as show:
        run(arms, args, show)
    rows = summarise(arms)
    for row in rows:
        share = ", ".join(f"{k} {v} %" for k, v in row["share_percent"].items())
        print(
            f"{row['arm']:<40}{row['median_ms']:>10} ms{row['ratio']:>8}x  {share}",
            file=sys.stderr,
        )
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
    }
    result = json.dumps({"settings": settings, "arms": rows})
    if args.output is not None:
        args.output.write_text(result + "\n", encoding="utf-8")
    print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
