# SPDX-License-Identifier: Apache-2.0
"""Serves a model with a KV policy and asks it the same thing with and without."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyformer_vllm.config import parse_budget
from keyformer_vllm.demo.model import default_model_dir, is_converted
from keyformer_vllm.demo.server import Server, exit_on_signals, find_free_port
from keyformer_vllm.demo.trace import (
    RequestSummary,
    read_trace,
    select_request,
    summarize,
)

QUESTION = "Summarise the following article in a few sentences."
SERVED_NAME = "demo"


@dataclass(frozen=True)
class Answer:
    """One streamed answer, with the token counts that the server reported."""

    response_id: str
    text: str
    prompt_tokens: int
    completion_tokens: int


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the arguments of `python -m keyformer_vllm demo`."""
    parser.add_argument(
        "--model",
        type=Path,
        default=default_model_dir(),
        help="folder of the model to serve (default: %(default)s)",
    )
    parser.add_argument("--policy", default="keyformer", help="default: %(default)s")
    parser.add_argument(
        "--budget", type=parse_budget, default=0.5, help="default: %(default)s"
    )
    parser.add_argument(
        "--article",
        type=Path,
        default=Path(__file__).with_name("article.txt"),
        help="text to summarise (default: the one in this package)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=160,
        help="longest answer, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--block-size", type=int, default=32, help="default: %(default)s"
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=4096,
        help="longest request, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        help="seconds to wait for the server (default: %(default)s)",
    )


def run(args: Namespace) -> int:
    """Runs the demonstration.

    Everything for people goes to stderr, the result as one JSON line to stdout. The
    server's whole process group has ended when this returns or raises.

    Returns:
        The exit status: 0, or 1 after a failure that stderr explains.
    """
    if not is_converted(args.model):
        _say(f"error: {args.model} holds no model; `make demo` prepares one")
        return 1
    folder = Path(tempfile.mkdtemp(prefix="keyformer-demo-"))
    trace_path = folder / "trace.jsonl"
    port = find_free_port()
    server = Server(
        serve_command(args, port, trace_path), folder / "server.log", port, _ENV
    )
    try:
        with exit_on_signals(), server:
            _say(
                f"starting vllm serve with --kv-policy {args.policy} "
                f"--kv-budget {args.budget} (about a minute) ..."
            )
            server.wait_until_ready(args.timeout)
            prompt = f"{QUESTION}\n\n{args.article.read_text().strip()}"
            answers = [
                ask(server.base_url, prompt, args.max_tokens, policy)
                for policy in (args.policy, "full")
            ]
        trace = read_trace(trace_path)
        evicted, full = (
            summarize(select_request(trace, answer.response_id)) for answer in answers
        )
    except Exception as error:
        _say(f"error: {error}")
        if "---" not in str(error):
            _say(server.log_tail())
        return 1  # the folder stays, with the log that stderr names
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    _say(format_table(args.policy, evicted, full))
    print(json.dumps(build_result(args, answers[0], evicted, full)), flush=True)
    return 0


def serve_command(args: Namespace, port: int, trace_path: Path) -> list[str]:
    """The command line of the server under demonstration."""
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--served-model-name": SERVED_NAME,
        "--block-size": args.block_size,
        "--max-model-len": args.max_model_len,
        "--kv-policy": args.policy,
        "--kv-budget": args.budget,
        "--kv-trace": trace_path,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    command.append(str(args.model))
    for name, value in options.items():
        command += [name, str(value)]
    # Compilation would cost more here than the two answers do.
    return [*command, "--enforce-eager"]


def ask(base_url: str, prompt: str, max_tokens: int, policy: str) -> Answer:
    """Asks one question through the OpenAI client and streams the answer to stderr.

    Args:
        base_url: the server, without `/v1`.
        prompt: the user's message.
        max_tokens: longest answer, in tokens.
        policy: KV policy of this request; `full` opts out of eviction.
    """
    from openai import DefaultHttpxClient, OpenAI

    _say(f"\n--- kv_policy={policy}")
    # A proxy that the environment names has no business with loopback.
    with OpenAI(
        base_url=f"{base_url}/v1",
        api_key="none",
        max_retries=0,
        timeout=600.0,
        http_client=DefaultHttpxClient(trust_env=False),
    ) as client:
        stream = client.chat.completions.create(
            model=SERVED_NAME,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"vllm_xargs": {"kv_policy": policy}},
        )
        response_id, pieces, usage = "", [], None
        for chunk in stream:
            response_id = chunk.id
            usage = chunk.usage or usage
            for choice in chunk.choices:
                piece = choice.delta.content or ""
                pieces.append(piece)
                print(piece, end="", file=sys.stderr, flush=True)
    _say("")
    if usage is None:
        raise RuntimeError("the server reported no token counts for the answer")
    return Answer(
        response_id, "".join(pieces), usage.prompt_tokens, usage.completion_tokens
    )


def build_result(
    args: Namespace, answer: Answer, evicted: RequestSummary, full: RequestSummary
) -> dict[str, Any]:
    """The JSON line at the end: what was asked for and what eviction did."""
    return {
        "policy": args.policy,
        "budget": args.budget,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "evicted_tokens": evicted.evicted_tokens,
        "freed_blocks": evicted.freed_blocks,
        "peak_blocks_full": full.peak_blocks,
        "peak_blocks_keyformer": evicted.peak_blocks,
        "answer": answer.text,
    }


def format_table(policy: str, evicted: RequestSummary, full: RequestSummary) -> str:
    """Both requests side by side; tokens are counted per KV head and layer."""
    rows = [
        ("tokens processed", full.logical_tokens, evicted.logical_tokens),
        (
            "tokens in the cache at the end",
            full.physical_tokens,
            evicted.physical_tokens,
        ),
        ("tokens evicted", full.evicted_tokens, evicted.evicted_tokens),
        ("blocks at the peak (prompt included)", full.peak_blocks, evicted.peak_blocks),
        ("blocks at the end", full.final_blocks, evicted.final_blocks),
        ("blocks given back before the end", full.freed_blocks, evicted.freed_blocks),
    ]
    width = max(len(policy), 9) + 2
    lines = [f"\n{'what eviction did':<38}{'full':>9}{policy:>{width}}"]
    lines += [f"{name:<38}{left:>9}{right:>{width}}" for name, left, right in rows]
    return "\n".join(lines) + "\n"


# Offline: the model is a folder. One GiB of cache holds dozens of such requests.
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
