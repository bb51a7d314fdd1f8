# SPDX-License-Identifier: Apache-2.0
"""How often does a model still say the same under a policy?

Teacher-forced: the model answers each article with its full cache; then every setting
is made to say these words while its own first choices are noted. Shown is the share of
positions with the same first choice (top-1 agreement), the mean over articles with its
95 % interval, and the difference to the first setting, article by article.

It takes long on a CPU. With --output the result is written after every setting, and the
same command continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import common
from common import UsageError

from keyformer_vllm.config import KeyformerConfig, KVPolicyError, parse_budget
from keyformer_vllm.core.policies import POLICIES
from keyformer_vllm.core.retention import Retention
from keyformer_vllm.demo.model import default_model_dir

SETTINGS_OF_ANSWERS = (
    "model",
    "dtype",
    "articles",
    "num_articles",
    "max_prompt_len",
    "new_tokens",
)
"""What the full cache's answers depend on."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--articles",
        type=Path,
        required=True,
        help="JSON lines, each with the text in `document`",
    )
    parser.add_argument("--model", type=Path, default=default_model_dir())
    parser.add_argument("--dtype", default="float32", help="of model and cache")
    parser.add_argument("--num-articles", type=int, default=30)
    parser.add_argument(
        "--max-prompt-len",
        type=int,
        default=1539,
        help="tokens; longer articles are left out",
    )
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--policies", nargs="+", default=["keyformer"])
    parser.add_argument("--budgets", nargs="+", type=parse_budget, default=[0.5])
    parser.add_argument(
        "--score-queries",
        nargs="+",
        default=["all"],
        help="settings of --kv-score-queries; for policies that score",
    )
    parser.add_argument("--select", nargs="+", default=["token"])
    parser.add_argument(
        "--min-tokens",
        type=int,
        default=64,
        help="floor of the budget; the server's default spares short articles",
    )
    parser.add_argument("--batch", type=int, default=8, help="requests at a time")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--cache-gib", type=float, default=1.0)
    parser.add_argument(
        "--fresh", action="store_true", help="do not continue what --output holds"
    )
    common.add_result_options(parser)
    return parser


def list_settings(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name to policy settings, one per combination that makes a difference.

    Raises:
        UsageError: for a setting that the server would refuse.
    """
    settings: dict[str, dict[str, Any]] = {}
    for policy in args.policies:
        for budget in args.budgets:
            for queries in args.score_queries:
                for select in args.select:
                    values = {
                        "policy": policy,
                        "budget": budget,
                        "min_tokens": args.min_tokens,
                        "score_queries": queries,
                        "select": select,
                    }
                    name = name_setting(values)
                    try:
                        KeyformerConfig.from_mapping(values)
                    except KVPolicyError as error:
                        raise UsageError(str(error)) from None
                    settings.setdefault(name, values)
    return settings


def name_setting(values: dict[str, Any]) -> str:
    """A name without what the policy ignores."""
    policy = values["policy"]
    if policy not in POLICIES or not POLICIES[policy].evicts:
        return str(policy)
    parts = [policy, str(values["budget"])]
    if POLICIES[policy].scores:
        parts.append(values["score_queries"])
    if values["select"] != "token":
        parts.append(values["select"])
    return " ".join(parts)


def count_evicting(
    values: dict[str, Any], prompts: list[list[int]], args: argparse.Namespace
) -> int:
    """Articles of which anything is evicted before the last token."""
    number = 0
    for prompt in prompts:
        retention = Retention.resolve(
            POLICIES[values["policy"]],
            num_prompt_tokens=len(prompt),
            block_size=args.block_size,
            budget=values["budget"],
            min_tokens=args.min_tokens,
        )
        last = len(prompt) + args.new_tokens - 1
        number += not retention.never_evicts(last)
    return number


def open_arm(
    args: argparse.Namespace, policy: dict[str, Any] | None, **more: Any
) -> Any:
    """An engine of the tests, with the given policy."""
    from tests.engine import open_engine

    return open_engine(
        args.model,
        policy,
        dtype=args.dtype,
        block_size=args.block_size,
        max_model_len=args.max_prompt_len + args.new_tokens,
        max_num_seqs=args.batch,
        kv_cache_memory_bytes=int(args.cache_gib * 2**30),
        **more,
    )


def run_to_end(engine: Any, requests: list[Any], description: str) -> None:
    """Step the engine until all requests are finished, behind a progress bar."""
    from tqdm import tqdm

    with tqdm(
        total=len(requests),
        desc=description,
        file=sys.stderr,
        disable=None,
        leave=False,
    ) as bar:
        while engine.busy:
            engine.step()
            bar.update(sum(request.finished for request in requests) - bar.n)
    engine.run()


def answer_in_full(
    args: argparse.Namespace, prompts: list[list[int]]
) -> list[list[int]]:
    """Greedy answers of stock vLLM."""
    with open_arm(args, None) as engine:
        requests = [
            engine.add(prompt, max_tokens=args.new_tokens) for prompt in prompts
        ]
        run_to_end(engine, requests, "full cache")
        return [request.tokens for request in requests]


def replay_setting(
    args: argparse.Namespace,
    values: dict[str, Any],
    prompts: list[list[int]],
    answers: list[list[int]],
    description: str,
) -> list[float]:
    """Agreement with the answers, per article."""
    from tests.quality import add_forced, agreements

    with open_arm(args, values, forcing=True) as engine:
        requests = add_forced(engine, prompts, answers)
        run_to_end(engine, requests, description)
        return agreements(requests, answers)


def read_progress(args: argparse.Namespace) -> dict[str, Any]:
    """What an earlier call with the same articles and model has finished.

    Raises:
        UsageError: if --output holds a result with other ones.
    """
    if args.fresh or args.output is None or not args.output.exists():
        return {"answers": None, "arms": []}
    before = common.read_result(args.output)
    now = common.settings_of(args)
    for name in SETTINGS_OF_ANSWERS:
        if before.get("settings", {}).get(name) != now[name]:
            raise UsageError(
                f"{args.output} was measured with another --{name.replace('_', '-')}; "
                "name another file, or give --fresh to replace it"
            )
    return before


def sum_up(arms: list[dict[str, Any]]) -> None:
    """Add means, intervals and differences to the first arm. Mutates `arms`."""
    first = arms[0]["shares"]
    for arm in arms:
        arm["agreement"] = common.mean_with_interval(arm["shares"])
        differences = [a - b for a, b in zip(arm["shares"], first, strict=True)]
        arm["difference"] = common.mean_with_interval(differences)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All settings, those that --output holds already left out."""
    sys.path.append(str(common.ROOT))  # the engine and the forcing are the tests' own
    from transformers import AutoTokenizer

    from tests.quality import article_prompts

    settings = list_settings(args)
    progress = read_progress(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    try:
        prompts = article_prompts(
            args.articles, tokenizer, args.num_articles, args.max_prompt_len
        )
    except (KeyError, OSError, ValueError) as error:
        raise UsageError(f"--articles: {error}") from None
    answers = progress["answers"] or answer_in_full(args, prompts)
    done = {arm["name"]: arm for arm in progress["arms"]}
    result: dict[str, Any] = {
        "benchmark": "quality",
        "machine": common.describe_machine(),
        "settings": common.settings_of(args),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "answers": answers,
        "arms": [],
    }
    for number, (name, values) in enumerate(settings.items(), 1):
        arm = done.get(name)
        if arm is None or arm["values"] != values:
            label = f"{number}/{len(settings)} {name}"
            arm = {
                "name": name,
                "values": values,
                "evicting": count_evicting(values, prompts, args),
                "shares": replay_setting(args, values, prompts, answers, label),
            }
        result["arms"].append(arm)
        sum_up(result["arms"])
        same = arm["agreement"]
        common.say(f"{name}: {_percent(same['mean'])} % ({_interval(same)})")
        save(args.output, result, done)
    common.say(format_arms(result["arms"]))
    return result


def save(
    path: Path | None, result: dict[str, Any], done: dict[str, dict[str, Any]]
) -> None:
    """Write what there is, other settings of an earlier call included."""
    if path is None:
        return
    now = {arm["name"] for arm in result["arms"]}
    kept = [arm for name, arm in done.items() if name not in now]
    text = json.dumps({**result, "arms": [*result["arms"], *kept]})
    part = path.with_suffix(".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def format_arms(arms: list[dict[str, Any]]) -> str:
    columns = ("setting", "top-1 %", "95 %", "difference", "95 %", "evicting")
    return common.format_table(
        columns,
        [
            (
                arm["name"],
                _percent(arm["agreement"]["mean"]),
                _interval(arm["agreement"]),
                _percent(arm["difference"]["mean"]),
                _interval(arm["difference"]),
                f"{arm['evicting']}/{len(arm['shares'])}",
            )
            for arm in arms
        ],
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _interval(found: dict[str, float]) -> str:
    return f"{_percent(found['low'])} to {_percent(found['high'])}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Agreement of every setting with its interval."""
    arms = result["arms"][::-1]
    with common.drawing(path, 8, 1.3 + 0.36 * len(arms)) as (_, (axes,)):
        means = [100 * arm["agreement"]["mean"] for arm in arms]
        reach = [
            [
                100 * (arm["agreement"]["mean"] - arm["agreement"]["low"])
                for arm in arms
            ],
            [
                100 * (arm["agreement"]["high"] - arm["agreement"]["mean"])
                for arm in arms
            ],
        ]
        axes.errorbar(means, range(len(arms)), xerr=reach, fmt="o", capsize=3)
        axes.set_yticks(range(len(arms)), [arm["name"] for arm in arms])
        axes.set_ylim(-0.5, len(arms) - 0.5)
        axes.set_xlabel("top-1 agreement with the full cache, % (95 % interval)")
        axes.set_title(
            f"{len(result['answers'])} articles, {result['settings']['model']}"
        )
        axes.grid(axis="x", alpha=0.4)


def main() -> None:
    args = build_parser().parse_args()
    common.check_result_options(args)
    if args.num_articles < 5 or args.new_tokens < 2:
        raise UsageError(
            "an interval needs --num-articles 5 and --new-tokens 2 or more"
        )
    common.set_environment()
    common.write_result(args, measure(args), draw)


if __name__ == "__main__":
    sys.exit(common.run_main(main))
