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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from common import UsageError
from engines import ARM_SYNTAX, EVICTION_OPS, parse_assignment, random_prompt
from served_arm import STOCK, ArmSpec, Round, ServedArm, take_turns

from keyformer_vllm.config import KeyformerConfig
from keyformer_vllm.core.capacity import Capacity, estimate_capacity
from keyformer_vllm.demo.model import default_model_dir

ALL = "all"
"""A pool that holds every request in full."""

_BUDGETS = ("keyformer:0.5", "keyformer:0.25")
_DEFAULT_PRESET = "admission"


@dataclass(frozen=True)
class Preset:
    """Settings under one name; lists span a grid.

    Args:
        question: what it answers.
        requests: how many are queued, one or more numbers.
        prompt_lens: tokens of each prompt.
        new_tokens: tokens that each request generates, one or more numbers.
        pools: full sequences that the pool holds, or `all`.
        arms: the first is what the others are compared with.
    """

    question: str
    requests: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    pools: tuple[int | str, ...]
    arms: tuple[str, ...] = ("off", *_BUDGETS)


PRESETS = {
    "off": Preset(
        question="what a plugin without a policy and a budget of 1.0 cost",
        requests=(4,),
        prompt_lens=(1024,),
        new_tokens=(128,),
        pools=(ALL,),
        arms=(STOCK, "off", "keyformer:1.0"),
    ),
    "ample": Preset(
        question="long prompts and room for all of them",
        requests=(8,),
        prompt_lens=(4096,),
        new_tokens=(128,),
        pools=(ALL,),
    ),
    "tight": Preset(
        question="six times as many requests as the pool holds in full",
        requests=(24,),
        prompt_lens=(2048,),
        new_tokens=(512,),
        pools=(4,),
    ),
    "prefill-bound": Preset(
        question="the same pool, but hardly anything to decode",
        requests=(24,),
        prompt_lens=(2048,),
        new_tokens=(64,),
        pools=(4,),
    ),
    "admission": Preset(
        question="whether freed blocks let more requests run; small and fast",
        requests=(16,),
        prompt_lens=(512,),
        new_tokens=(128,),
        pools=(4,),
        arms=("off", "keyformer:0.5"),
    ),
    "crossover": Preset(
        question="from ample to tight, long answers and short ones: where the gain begins",
        requests=(16,),
        prompt_lens=(2048,),
        new_tokens=(512, 64),
        pools=(ALL, 12, 8, 6, 4, 2),
    ),
}


@dataclass(frozen=True)
class Point:
    """One workload on one pool; all arms are measured there.

    Args:
        requests: how many are queued.
        prompt_len, new_tokens: of each request.
        pool: full sequences that the pool holds.
    """

    requests: int
    prompt_len: int
    new_tokens: int
    pool: int

    def blocks_per_request(self, block_size: int) -> int:
        """Blocks of a full sequence."""
        return -(-(self.prompt_len + self.new_tokens) // block_size)

    def num_blocks(self, block_size: int) -> int:
        """Blocks to ask for: those of the full sequences and vLLM's null block."""
        return self.pool * self.blocks_per_request(block_size) + 1

    @property
    def total_tokens(self) -> int:
        return self.requests * (self.prompt_len + self.new_tokens)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests of {self.prompt_len} + {self.new_tokens} "
            f"tokens, pool of {self.pool} full sequences"
        )


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
    parser.add_argument("--block-size", type=_positive, default=32)
    parser.add_argument(
        "--max-batched-tokens",
        type=_positive,
        default=2048,
        help="tokens per step, prompt chunks included",
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
    args.pool = args.pool or list(preset.pools)


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
        "max_num_seqs": point.requests,
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
            found = {**dataclasses.asdict(point), "arms": arms}
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
            for tokens in take_turns(arms):
                bar.update(tokens)
            for arm in arms:
                arm.finish()
        return [
            describe_arm(arm, arms[0], expect(point, spec, args.block_size), point)
            | {"policy": spec.policy()}
            for arm, spec in zip(arms, specs, strict=True)
        ]


def describe_arm(
    arm: ServedArm, base: ServedArm, expected: Capacity, point: Point
) -> dict[str, Any]:
    """The figures of an arm over all its rounds."""
    rounds = arm.rounds
    seconds = sum(one.seconds for one in rounds)
    tokens = sum(len(times) for one in rounds for times in one.token_times.values())
    ops = {name for one in rounds for name in one.op_seconds}
    return {
        "name": arm.name,
        **{name: arm.facts[name] for name in ("pool_blocks", "pool_mib", "plugin")},
        "async_scheduling": arm.facts["async_scheduling"],
        "seconds": seconds,
        "output_tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "ratio": compare_rounds(rounds, base.rounds),
        "cpu_seconds": sum(one.cpu_seconds for one in rounds),
        "cpu_ratio": compare_rounds(rounds, base.rounds, "cpu_seconds"),
        "ttft_s": _spread([t[0] for one in rounds for t in one.token_times.values()]),
        "itl_s": _spread([gap for one in rounds for gap in gaps_of(one)]),
        "running": {
            "peak": max(max(one.running) for one in rounds),
            "mean": _mean([n for one in rounds for n in one.running]),
            "steady": _mean([n for one in rounds for n in one.saturated]),
            "expected": min(expected.running, point.requests),
        },
        "preemptions": sum(one.preemptions for one in rounds),
        "evicted_tokens": sum(one.evicted_tokens for one in rounds),
        "freed_blocks": sum(one.freed_blocks for one in rounds),
        "peak_used_blocks": max(one.used_blocks for one in rounds),
        "steps": {
            "prefill": sum(one.prefill_steps for one in rounds),
            "decode": sum(one.steps - one.prefill_steps for one in rounds),
        },
        "step_seconds": {
            "prefill": sum(one.prefill_seconds for one in rounds),
            "decode": sum(one.seconds - one.prefill_seconds for one in rounds),
        },
        "share_percent": {
            name: 100 * sum(one.op_seconds.get(name, 0.0) for one in rounds) / seconds
            for name in sorted(ops)
        },
    }


def compare_rounds(
    rounds: list[Round], base: list[Round], clock: str = "seconds"
) -> dict[str, float]:
    """Throughput against the base: of all time together, and the range of rounds."""
    times = [getattr(one, clock) for one in rounds]
    base_times = [getattr(one, clock) for one in base]
    each = [b / a for a, b in zip(times, base_times, strict=True)]
    return {"total": sum(base_times) / sum(times), "min": min(each), "max": max(each)}


def gaps_of(one: Round) -> list[float]:
    """Seconds between a request's tokens, preemptions included."""
    return [
        after - before
        for times in one.token_times.values()
        for before, after in itertools.pairwise(times)
    ]


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Keep what a long sweep has measured so far."""
    if path is not None:
        text = json.dumps(common.round_floats(result))
        path.write_text(text + "\n", encoding="utf-8")


def format_point(point: dict[str, Any]) -> str:
    """The workload, and a table of its arms."""
    arms = point["arms"]
    ops = [
        name for name in EVICTION_OPS if any(name in a["share_percent"] for a in arms)
    ]
    columns = (
        *(
            "arm",
            "tok/s",
            "ratio",
            "min",
            "max",
            "CPU",
            "TTFT s",
            "p90",
            "ITL ms",
            "p90",
        ),
        *("running", "mean", "steady", "expected", "preempted", "freed"),
        *("prefill s", "decode s", *(f"{name} %" for name in ops)),
    )
    rows = [
        (
            arm["name"],
            arm["tokens_per_s"],
            *(arm["ratio"][name] for name in ("total", "min", "max")),
            arm["cpu_ratio"]["total"],
            *(arm["ttft_s"][name] for name in ("median", "p90")),
            *(1e3 * arm["itl_s"][name] for name in ("median", "p90")),
            *(arm["running"][name] for name in ("peak", "mean", "steady", "expected")),
            arm["preemptions"],
            arm["freed_blocks"],
            *(arm["step_seconds"][name] for name in ("prefill", "decode")),
            *(arm["share_percent"].get(name) for name in ops),
        )
        for arm in arms
    ]
    names = [field.name for field in dataclasses.fields(Point)]
    workload = Point(**{name: point[name] for name in names})
    return f"{workload}\n{common.format_table(columns, rows)}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Throughput against the first arm over the pool size, a panel per workload."""
    pyplot = common.load_pyplot()
    workloads: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for point in result["points"]:
        key = (point["requests"], point["prompt_len"], point["new_tokens"])
        workloads.setdefault(key, []).append(point)
    figure, panels = pyplot.subplots(
        *(len(workloads), 1),
        figsize=(8, 0.6 + 3.6 * len(workloads)),
        layout="constrained",
        squeeze=False,
    )
    for axes, (key, points) in zip(panels[:, 0], workloads.items(), strict=True):
        requests, prompt_len, new_tokens = key
        axes.set_title(f"{requests} requests of {prompt_len} + {new_tokens} tokens")
        _draw_workload(axes, sorted(points, key=lambda point: -point["pool"]))
    figure.suptitle(f"{result['settings']['dtype']}, {result['machine']['cpu']}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_workload(axes: Any, points: list[dict[str, Any]]) -> None:
    base, *names = [arm["name"] for arm in points[0]["arms"]]
    ratios = {
        name: [
            next(arm["ratio"] for arm in point["arms"] if arm["name"] == name)
            for point in points
        ]
        for name in names
    }
    # Pools stand side by side at equal distances, ample on the left: the tight end,
    # where most happens, would else be squeezed together.
    places = range(len(points))
    for name, found in ratios.items():
        totals = [ratio["total"] for ratio in found]
        reach = [
            [total - ratio["min"] for total, ratio in zip(totals, found, strict=True)],
            [ratio["max"] - total for total, ratio in zip(totals, found, strict=True)],
        ]
        axes.errorbar(places, totals, yerr=reach, marker="o", capsize=3, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    low, high = axes.get_ylim()
    low, high = min(low, 0.9), max(high, 1.1)
    axes.axhspan(low, 1.0, color="tab:red", alpha=0.08)
    axes.text(0.01, 0.02, f"slower than {base}", transform=axes.transAxes, fontsize=8)
    axes.set_ylim(low, high)
    axes.set_xlim(-0.5, len(points) - 0.5)
    axes.set_xticks(places, [_label_pool(point) for point in points])
    axes.set_xlabel("pool in full sequences (requests running in the first arm)")
    axes.set_ylabel(f"output tok/s against {base}")
    axes.grid(axis="y", alpha=0.4)
    if names:
        axes.legend(loc="best", fontsize=8)


def _label_pool(point: dict[str, Any]) -> str:
    return f"{point['pool']} ({point['arms'][0]['running']['mean']:.1f})"


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


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": common.percentile(values, 0.5),
        "p90": common.percentile(values, 0.9),
    }


def _mean(values: list[int]) -> float | None:
    return sum(values) / len(values) if values else None


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
