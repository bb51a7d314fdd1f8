# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m keyformer_vllm demo`, `plan` or `env`."""

from __future__ import annotations

import argparse
import sys

from keyformer_vllm import __version__, environment, plan
from keyformer_vllm.demo import run as demo


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="python -m keyformer_vllm",
        description="Keyformer KV-cache eviction for stock vLLM.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser(
        "demo",
        help="serve a model with eviction on and ask it about an article",
        description="Starts vllm serve with a KV policy, asks it to summarise an "
        "article with and without eviction, and prints one JSON line at the end.",
    )
    demo.add_arguments(command)
    command.set_defaults(run=demo.run)

    command = commands.add_parser(
        "plan",
        help="say how many requests a pool of blocks keeps running",
        description="Prints the budget in tokens, the blocks that requests of one "
        "length hold, and how many of them run at once with and without eviction.",
    )
    plan.add_arguments(command)
    command.set_defaults(run=plan.run)

    command = commands.add_parser(
        "env",
        help="print what a bug report should say about this machine",
        description="Prints versions, CPU features and the state of the extension.",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=environment.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
