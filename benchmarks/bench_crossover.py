# SPDX-License-Identifier: Apache-2.0
"""From which pool size on does a KV policy serve more tokens per second than vLLM?

All requests are queued at the start; an arm ends when its last request has. Each arm
has an engine in a process of its own with the same number of blocks, and they take
turns step by step, the one furthest behind next. Throughput is that of the whole run,
prefill included, by the arm's own clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bars
import common
from common import UsageError
from crossover_report import describe_arm, draw, format_point
from engines import ARM_SYNTAX, parse_assignment, random_prompt
from served_arm import STOCK, ArmSpec, ServedArm, one_by_one, take_turns
from workloads import ALL, PRESETS, OnGpu, Point

from keyformer_vllm.config import KeyformerConfig
from keyformer_vllm.core.capacity import Capacity, estimate_capacity
from keyformer_vllm.demo.model import default_model_dir

_DEFAULT_PRESET = "admission"
TURNS = {"steps": take_turns, "off": one_by_one}
_ON_CPU = OnGpu(block_size=32, max_batched_tokens=2048)


def build_parser() -> argparse.ArgumentParser:
    presets = "\n".join(
        f"  {name:<14} {preset.question}" for name, preset in PRESETS.items()
    )
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\npresets:\n{presets}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=default_model_dir())
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default=_DEFAULT_PRESET,
        help="settings to start from; options win over them (default: %(default)s)",
    )
    parser.add_argument(
        "--arm",
        dest="arms",
        action="append",
        help=f"{STOCK} (the plugin is not even loaded), {ARM_SYNTAX}; the first arm is "
        "what the others are compared with",
    )
    parser.add_argument("--requests", type=_positive, nargs="+", help="queued at once")
    parser.add_argument("--prompt-len", type=_positive, nargs="+", help="tokens")
    parser.add_argument("--new-tokens", type=_positive, nargs="+")
    parser.add_argument(
        "--pool",
        type=_pool,
        nargs="+",
        help=f"full sequences that the pool holds, or `{ALL}`; several make a sweep",
    )
    parser.add_argument(
        "--pool-tokens", type=_positive, help="tokens that the pool holds, not --pool"
    )
    parser.add_argument(
        "--max-num-seqs",
        type=_positive,
        help="requests that may run at once (default: all)",
    )
    parser.add_argument(
        "--turns",
        choices=TURNS,
        help="steps: the arms take turns step by step; off: one arm after the other, "
        "all started side by side (default: off for a GPU's presets)",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        metavar="FRACTION",
        help="shrink all lengths, and the floor of the budget, for a quick try",
    )
    parser.add_argument(
        "--rounds",
        type=_positive,
        default=1,
        help="passes over the requests; ratios get a range from them",
    )
    parser.add_argument(
        "--articles",
        type=Path,
        help="real text: JSON lines, each with `document`, joined and cut into "
        "prompts (default: random tokens)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts")
    parser.add_argument("--dtype", default="bfloat16", help="of model and cache")
    parser.add_argument(
        "--block-size", type=_positive, help="(default: 32; 16 for a GPU's presets)"
    )
    parser.add_argument(
        "--max-batched-tokens",
        type=_positive,
        help="tokens per step, prompt chunks included (default: 2048; 8192 for a GPU's "
        "presets)",
    )
    parser.add_argument(
        "--set",
        dest="engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of vllm.LLM for all arms, for example enforce_eager=false",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="time our operators too: the share of each in the arm's time",
    )
    parser.add_argument(
        "--show",
        type=Path,
        metavar="FILE",
        help="measure nothing: print and draw the result in this file",
    )
    common.add_result_options(parser)
    return parser


def apply_preset(args: argparse.Namespace) -> None:
    """Fill in what the options left open. Mutates `args`.

    Raises:
        UsageError: for a scale outside (0, 1].
    """
    if not 0 < args.scale <= 1:
        raise UsageError(f"--scale {args.scale} is not in (0, 1]")
    preset = PRESETS[args.preset]
    args.arms = args.arms or list(preset.arms)
    args.requests = args.requests or list(preset.requests)
    args.prompt_len = args.prompt_len or list(preset.prompt_lens)
    args.new_tokens = args.new_tokens or list(preset.new_tokens)
    sizes = preset.gpu or _ON_CPU
    if args.pool is not None:
        sizes = dataclasses.replace(sizes, pool_tokens=None)
    args.pool = args.pool or list(preset.pools)
    for name, value in vars(sizes).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.turns = args.turns or ("steps" if preset.gpu is None else "off")
    if preset.gpu is not None:
        args.profile = True
        args.engine = ["load_format=dummy", *args.engine]


def list_points(args: argparse.Namespace) -> list[Point]:
    """The grid, workload by workload, pools in the given order; equal ones once."""
    points = []
    for prompt_len, new_tokens, requests, pool in itertools.product(
        args.prompt_len, args.new_tokens, args.requests, args.pool
    ):
        points.append(
            Point(
                requests=requests,
                prompt_len=_scale(prompt_len, args.scale),
                # With one token there is nothing between tokens.
                new_tokens=max(2, _scale(new_tokens, args.scale)),
                pool=requests if pool == ALL else pool,
                pool_tokens=args.pool_tokens,
            )
        )
    return list(dict.fromkeys(points))


def list_specs(args: argparse.Namespace, point: Point) -> list[ArmSpec]:
    """What the arms of a point are; they differ in nothing but the policy.

    Raises:
        UsageError: for an arm or an engine argument that is spelled wrong, or an arm
            that is named twice.
    """
    engine = {
        "dtype": args.dtype,
        "block_size": args.block_size,
        "max_model_len": point.prompt_len + point.new_tokens,
        # Blocks shall be scarce, not slots.
        "max_num_seqs": args.max_num_seqs or point.requests,
        "max_num_batched_tokens": args.max_batched_tokens,
        **dict(parse_assignment("--set", text) for text in args.engine),
    }
    floor = _scale(KeyformerConfig(policy="keyformer").min_tokens, args.scale)
    specs = [
        ArmSpec(
            name=name,
            model=str(args.model),
            num_blocks=point.num_blocks(args.block_size),
            engine=engine,
            policy_defaults={"min_tokens": floor} if args.scale < 1 else {},
            profile=args.profile,
        )
        for name in args.arms
    ]
    if len(set(args.arms)) < len(args.arms):
        raise UsageError("an arm is named twice")
    for spec in specs:
        spec.policy()
    return specs


def expect(point: Point, spec: ArmSpec, block_size: int) -> Capacity:
    """Blocks that a request of this arm holds, and how many should run at once."""
    config = KeyformerConfig.from_mapping(spec.policy() or {"policy": "full"})
    return estimate_capacity(
        config.retention(point.prompt_len, block_size),
        num_new_tokens=point.new_tokens,
        num_blocks=spec.num_blocks - 1,
    )


class Prompts:
    """Token ids for the requests of all arms, the same for each.

    Args:
        args: `articles`, `model` and `seed` are read.
        needed: tokens of the largest workload.

    Raises:
        UsageError: if the articles cannot be read or are too few.
    """

    def __init__(self, args: argparse.Namespace, needed: int) -> None:
        self.seed = args.seed
        self.text: list[int] | None = None
        self.source = f"random tokens, seed {args.seed}"
        if args.articles is not None:
            self.text = _read_articles(args.articles, args.model)
            self.source = f"articles of {args.articles.name}"
            found = len(self.text)
            if found < needed:
                raise UsageError(
                    f"{args.articles} holds {found} tokens; {needed} are needed"
                )

    def draw(self, point: Point, vocab_size: int) -> list[list[int]]:
        length = point.prompt_len
        if self.text is None:
            return [
                random_prompt(self.seed, index, length, vocab_size)
                for index in range(point.requests)
            ]
        return [
            self.text[index * length : (index + 1) * length]
            for index in range(point.requests)
        ]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All points, one after the other; the arms of a point in turns."""
    from tqdm import tqdm

    points = list_points(args)
    for point in points:
        list_specs(args, point)
    if PRESETS[args.preset].gpu is not None and not _has_gpu():
        raise UsageError(f"--preset {args.preset} needs a GPU, and torch sees none")
    prompts = Prompts(args, max(p.requests * p.prompt_len for p in points))
    total = args.rounds * len(args.arms) * sum(p.total_tokens for p in points)
    result = {
        "benchmark": "crossover",
        "machine": common.describe_machine(),
        "settings": common.settings_of(args),
        "prompts": prompts.source,
        "points": [],
    }
    with tqdm(total=total, unit="tok", file=sys.stderr, disable=None) as bar:
        for point in points:
            bar.set_description(f"pool {point.pool}")
            arms = measure_point(args, point, prompts, bar)
            found = {
                **dataclasses.asdict(point),
                "arms": arms,
                "bars": bars.judge_arms(args.preset, arms),
            }
            result["points"].append(found)
            with tqdm.external_write_mode(file=sys.stderr):
                common.say(format_point(found))
            save(args.output, result)
    return result


def measure_point(
    args: argparse.Namespace, point: Point, prompts: Prompts, bar: Any
) -> list[dict[str, Any]]:
    """Run the requests through every arm."""
    specs = list_specs(args, point)
    with ExitStack() as stack:
        arms = [stack.enter_context(ServedArm(spec)) for spec in specs]
        for arm in arms:
            arm.ready()
        requests = prompts.draw(point, arms[0].facts["vocab_size"])
        for arm in arms:
            arm.warm_up(requests[0])
        for _ in range(args.rounds):
            for arm in arms:
                arm.queue(requests, point.new_tokens)
            for tokens in TURNS[args.turns](arms):
                bar.update(tokens)
            for arm in arms:
                arm.finish()
        return [
            describe_arm(arm, arms[0], expect(point, spec, args.block_size), point)
            | {"policy": spec.policy()}
            for arm, spec in zip(arms, specs, strict=True)
        ]


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Keep what a long sweep has measured so far."""
    if path is not None:
        text = json.dumps(common.round_floats(result))
        path.write_text(text + "\n", encoding="utf-8")


def _read_articles(path: Path, model: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        documents = [json.loads(line)["document"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--articles {path}: {error!r}") from None
    tokens: list[int] = []
    for document in documents:
        tokens += tokenizer.encode(document + "\n\n", add_special_tokens=False)
    return tokens


def _has_gpu() -> bool:
    import torch

    found: bool = torch.cuda.is_available()
    return found


def _scale(length: int, fraction: float) -> int:
    return max(1, round(length * fraction))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _pool(text: str) -> int | str:
    return ALL if text == ALL else _positive(text)


def main() -> None:
    args = build_parser().parse_args()
    common.check_result_options(args)
    if args.show is not None:
        result = common.read_result(args.show)
        if result.get("benchmark") != "crossover":
            raise UsageError(f"{args.show} holds the result of another benchmark")
        for point in result["points"]:
            common.say(format_point(point))
    else:
        apply_preset(args)
        common.set_environment()
        result = measure(args)
    common.write_result(args, result, draw)


if __name__ == "__main__":
    sys.exit(common.run_main(main))
