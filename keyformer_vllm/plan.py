# SPDX-License-Identifier: Apache-2.0
"""`python -m keyformer_vllm plan`: what a budget frees, before a server is started."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from keyformer_vllm.config import (
    BUDGET_BASES,
    POLICY_NAMES,
    KeyformerConfig,
    KVPolicyError,
    parse_budget,
)
from keyformer_vllm.core.capacity import estimate_capacity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    defaults = KeyformerConfig(policy="keyformer")

    def add(option: str, kind: Any, default: Any, text: str, **more: Any) -> None:
        shown = "" if default is None else " (default: %(default)s)"
        required = default is None and "metavar" not in more
        parser.add_argument(
            option,
            type=kind,
            default=default,
            required=required,
            help=text + shown,
            **more,
        )

    add("--prompt-len", _positive, None, "tokens of each prompt")
    add("--new-tokens", _positive, None, "tokens that each request generates")
    add("--blocks", _positive, None, "KV blocks of the server, as it logs them")
    add("--block-size", _positive, 32, "tokens per block")
    add("--policy", str, defaults.policy, "KV policy", choices=POLICY_NAMES)
    add("--budget", parse_budget, defaults.budget, "as --kv-budget")
    add("--min-tokens", _positive, defaults.min_tokens, "as --kv-min-tokens")
    add(
        "--budget-base",
        str,
        defaults.budget_base,
        "as --kv-budget-base",
        choices=BUDGET_BASES,
    )
    add(
        "--max-num-seqs", _positive, None, "vLLM's cap on running requests", metavar="N"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """The figures, name to value.

    Raises:
        KVPolicyError: for a budget that no server would take.
    """
    config = KeyformerConfig(
        policy=args.policy,
        budget=args.budget,
        min_tokens=args.min_tokens,
        budget_base=args.budget_base,
    )
    capacity = estimate_capacity(
        config.retention(args.prompt_len, args.block_size),
        num_new_tokens=args.new_tokens,
        num_blocks=args.blocks - 1,  # one of them is vLLM's null block
    )
    cap = args.max_num_seqs
    facts: dict[str, Any] = {
        "budget in tokens": capacity.budget_tokens,
        "blocks of a prompt": capacity.prompt_blocks,
        "blocks held while decoding": capacity.held_blocks,
        "blocks held at the end without eviction": capacity.full_blocks,
        "requests running": _capped(capacity.running, cap),
        "requests running without eviction": _capped(
            capacity.running_without_eviction, cap
        ),
    }
    if cap is not None and cap < capacity.running:
        facts["max_num_seqs to raise to"] = capacity.running
    return facts


def run(args: argparse.Namespace) -> int:
    """Prints the figures, one a line or as one JSON object; returns the status."""
    try:
        facts = plan(args)
    except KVPolicyError as error:
        print(f"keyformer: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({name.replace(" ", "_"): facts[name] for name in facts}))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {value}")
    return 0


def _capped(running: int, cap: int | None) -> int:
    return running if cap is None else min(running, cap)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value
