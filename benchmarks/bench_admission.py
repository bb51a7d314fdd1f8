# SPDX-License-Identifier: Apache-2.0
"""Do blocks that eviction gives back let more requests run at the same time?

A pool of fixed size, more requests than fit, one process per arm. The engine is stepped
by hand and the number of running requests sampled after each step. Prefix caching is
off in both arms, because a policy forces it off; max_num_seqs is the number of requests
in both, so that blocks and not slots are what is scarce. Blocks are counted, not RSS:
the cache is one allocation of the same size in both arms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from keyformer_vllm.config import parse_budget
from keyformer_vllm.demo.model import default_model_dir


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=default_model_dir())
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt-len", type=int, default=1024, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument(
        "--full-sequences",
        type=int,
        default=4,
        help="the pool holds this many sequences of prompt and new tokens",
    )
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument(
        "--max-batched-tokens",
        type=int,
        default=1024,
        help="tokens per step, prompt chunks included",
    )
    parser.add_argument(
        "--cache-gib",
        type=float,
        default=1.0,
        help="memory for the pool; without it vLLM asks for most of the machine's",
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--policy", default="keyformer")
    parser.add_argument(
        "--budgets",
        type=parse_budget,
        nargs="+",
        default=[0.5],
        help="one arm each, beside the one with the policy off",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    return parser


def count_pool_blocks(args: argparse.Namespace) -> int:
    """Blocks to ask for: those of the full sequences and vLLM's null block."""
    tokens = args.prompt_len + args.new_tokens
    return args.full_sequences * math.ceil(tokens / args.block_size) + 1


def run_arm(args: argparse.Namespace, budget: float | int | None) -> dict[str, Any]:
    """Runs all requests in this process; `budget` None means stock vLLM."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    policy: dict[str, Any] = {}
    if budget is not None:
        settings = {"policy": args.policy, "budget": budget}
        policy["additional_config"] = {"keyformer": settings}
    llm = LLM(
        model=str(args.model),
        dtype=args.dtype,
        block_size=args.block_size,
        num_gpu_blocks_override=count_pool_blocks(args),
        kv_cache_memory_bytes=int(args.cache_gib * 2**30),
        max_model_len=args.prompt_len + args.new_tokens,
        max_num_seqs=args.requests,
        max_num_batched_tokens=args.max_batched_tokens,
        enable_prefix_caching=False,
        enforce_eager=True,
        skip_tokenizer_init=True,
        **policy,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool

    draw = random.Random(args.seed)
    vocab_size = engine.model_config.get_vocab_size()
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=args.new_tokens,
        ignore_eos=True,
        detokenize=False,
    )
    for index in range(args.requests):
        prompt = [draw.randrange(3, vocab_size) for _ in range(args.prompt_len)]
        engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling)

    free_at_start = pool.get_num_free_blocks()
    requests = dict(scheduler.requests)
    running: list[int] = []
    used_at_peak = 0
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
        running.append(len(scheduler.running))
        used_at_peak = max(used_at_peak, free_at_start - pool.get_num_free_blocks())
    return {
        "budget": budget,
        "peak_running": max(running),
        "mean_running": round(sum(running) / len(running), 2),
        "steps": len(running),
        "preemptions": sum(request.num_preemptions for request in requests.values()),
        "pool_blocks": free_at_start,
        "peak_used_blocks": used_at_peak,
        "free_blocks_at_end": pool.get_num_free_blocks(),
        "seconds": round(time.perf_counter() - started, 1),
    }


def run_arm_in_subprocess(
    args: argparse.Namespace, budget: float | int | None
) -> dict[str, Any]:
    """One arm in a fresh interpreter; what it prints goes to our stderr.

    Raises:
        RuntimeError: if the arm fails.
    """
    print(f"arm: {'policy off' if budget is None else budget} ...", file=sys.stderr)
    command = [sys.executable, *sys.argv, "--arm", json.dumps(budget)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"arm {budget} ended with status {done.returncode}")
    sys.stderr.write("".join(line + "\n" for line in lines[:-1]))
    return json.loads(lines[-1])


def main() -> int:
    args = build_parser().parse_args()
    if args.arm is not None:
        print(json.dumps(run_arm(args, json.loads(args.arm))), flush=True)
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arms = [run_arm_in_subprocess(args, budget) for budget in (None, *args.budgets)]
    for arm in arms:
        arm["ratio"] = round(arm["peak_running"] / arms[0]["peak_running"], 2)

    columns = ("budget", "peak_running", "ratio", "mean_running", "preemptions")
    columns += ("pool_blocks", "peak_used_blocks", "steps", "seconds")
    print("".join(f"{name:>18}" for name in columns), file=sys.stderr)
    for arm in arms:
        cells = ["off" if arm[name] is None else str(arm[name]) for name in columns]
        print("".join(f"{cell:>18}" for cell in cells), file=sys.stderr)
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name != "arm"
    }
    print(json.dumps({"settings": settings, "arms": arms}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
