# SPDX-License-Identifier: Apache-2.0
"""What should the CUDA operators take on a GPU? Predicted, not measured.

A kernel takes as long as its bytes at the bandwidth of a copy, or as its instructions
at the rate that the multiprocessors can issue, whichever is longer; a call takes as
long as its kernels. Launches, the last wave of thread blocks and what the L2 cache
keeps are left out. The figures are to be
held against a measurement, and replaced by it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import common

WARP = 32
CHUNK_KEYS = 16
RANGE_KEYS = 256

# Instructions of one warp in the machine code for sm_90a, head size 128, with noise at
# tau 1 and neither soft cap nor bias: nvcc 13.0, counted in the loops of nvdisasm.
ATTEND_CHUNK = 660  # 16 keys, and its part of the end of a range
WEIGH_TILE = 1011  # 16 query vectors times 64 keys, and its part of preparing a range
ADD_TILE = 154  # the same, and its part of what a tile of 64 times 64 takes
SELECT_SLOT = 150  # of one lane: four passes over a score, of about 40 each
TILE_WEIGHTS = 16 * 64

# Bytes per weight: itself, written and read; its row's maximum, sum and factor in a
# tile of 64 keys.
WEIGH_BYTES = 2 + 8 / 64
ADD_BYTES = 8 / 64 + 4 / 64 + 2 + 4 / 64


@dataclass(frozen=True)
class Gpu:
    """An H200: the copy was measured, the clock is what it holds under load."""

    bandwidth: float = 4.3e12  # bytes per second, read and written
    num_multiprocessors: int = 132
    clock: float = 1.755e9
    schedulers: int = 4  # of a multiprocessor, an instruction per cycle each
    issue_share: float = 0.6  # of the cycles in which one issues

    def bytes_time(self, num_bytes: float) -> float:
        return num_bytes / self.bandwidth

    def issue_time(self, num_warp_instructions: float) -> float:
        rate = self.num_multiprocessors * self.schedulers * self.clock
        return num_warp_instructions / (rate * self.issue_share)


@dataclass(frozen=True)
class Model:
    """An 8B model in bfloat16; how fast it takes prompts was measured on stock vLLM."""

    num_layers: int = 32
    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    element_size: int = 2
    block_size: int = 16
    prefill_rate: float = 42e3  # tokens per second


@dataclass(frozen=True)
class Prediction:
    """One call, or all calls of a step.

    Args:
        seconds: the longer of the two times, kernel by kernel.
        bytes_seconds, issue_seconds: what each alone would take.
        share_of: what `seconds` is compared with.
        share: of that.
    """

    name: str
    seconds: float
    bytes_seconds: float
    issue_seconds: float
    share_of: str
    share: float


class Work(NamedTuple):
    """Of kernels that run side by side; instructions are those of warps."""

    num_bytes: float
    instructions: float


def predict(
    gpu: Gpu, name: str, work: Sequence[Work], share_of: str, base: float
) -> Prediction:
    """`work` one after the other; `base` in seconds."""
    moved = [gpu.bytes_time(one.num_bytes) for one in work]
    issued = [gpu.issue_time(one.instructions) for one in work]
    seconds = sum(map(max, moved, issued))
    return Prediction(name, seconds, sum(moved), sum(issued), share_of, seconds / base)


def kv_bytes(model: Model, num_keys: int) -> int:
    """K and V of `num_keys` tokens in one layer."""
    width = 2 * model.head_size * model.element_size
    return num_keys * model.num_kv_heads * width


def attention_bytes(model: Model, num_keys: int) -> int:
    """What paged_attention_scored moves in one layer, nothing kept in the L2 cache."""
    heads, kv_heads = model.num_query_heads, model.num_kv_heads
    side = num_keys * kv_heads * (4 + 2 * 4)  # position read, score read and written
    logits = 2 * num_keys * heads * 4  # written and read
    ranges = 2 * (num_keys // RANGE_KEYS) * heads * (4 * model.head_size + 16)
    return kv_bytes(model, num_keys) + side + logits + ranges


def score_work(model: Model, key_bytes: float, num_weights: float) -> list[Work]:
    """Of score_keys in all layers: weights of one query head, keys read once."""
    weights = num_weights * model.num_query_heads * model.num_layers
    tiles = weights / TILE_WEIGHTS
    return [
        Work(key_bytes * model.num_layers + weights * WEIGH_BYTES, tiles * WEIGH_TILE),
        Work(weights * ADD_BYTES, tiles * ADD_TILE),
    ]


def predict_all(gpu: Gpu, model: Model, step: float) -> list[Prediction]:
    """The calls that the README lists; `step` is that of decoding, in seconds."""
    layers, kv_heads = model.num_layers, model.num_kv_heads
    keys = 64 * 4096
    made = [
        predict(
            gpu,
            "paged_attention_scored, a layer, 64 x 4,096",
            [
                Work(
                    attention_bytes(model, keys),
                    keys * kv_heads / CHUNK_KEYS * ATTEND_CHUNK,
                )
            ],
            "reading K and V",
            gpu.bytes_time(kv_bytes(model, keys)),
        )
    ]
    prompt = 4096
    for label, rows in (("all", 1), ("stride:4", 4)):
        made.append(
            predict(
                gpu,
                f"score_keys, prompt of 4,096, {label}",
                score_work(
                    model, kv_bytes(model, prompt) / 2, prompt * prompt / 2 / rows
                ),
                "prefill",
                prompt / model.prefill_rate,
            )
        )
    # A request evicts, and a ring of queries scores, once in a block of tokens.
    num_reqs, kv_len, every = 64, 2048, model.block_size
    slots = num_reqs * kv_len * kv_heads * layers
    decode = f"decode step of {step * 1e3:.0f} ms"
    made.append(
        predict(
            gpu,
            "score_keys, ring of 16, 64 x 2,048, a step",
            score_work(
                model,
                kv_bytes(model, num_reqs * kv_len) / 2 / every,
                num_reqs * kv_len,
            ),
            decode,
            step,
        )
    )
    made.append(
        predict(
            gpu,
            "select_keep, 64 x 2,048, a step",
            [Work(slots * 9 / every, slots * SELECT_SLOT / WARP / every)],
            decode,
            step,
        )
    )
    # At most a block of survivors moves per KV head: read and written.
    moved = num_reqs * every * kv_heads * layers
    row = 2 * model.head_size * model.element_size + 8
    made.append(
        predict(
            gpu,
            "compact_kv, 64 x 2,048, a step",
            [
                Work(
                    (2 * moved * row + slots) / every,
                    (moved * 40 + slots / WARP * 20) / every,
                )
            ],
            decode,
            step,
        )
    )
    return made


def format_predictions(predictions: list[Prediction]) -> str:
    columns = ("Call", "Predicted ms", "Bytes, ms", "Instructions, ms", "Against", "x")
    return common.format_table(
        columns,
        [
            (
                one.name,
                one.seconds * 1e3,
                one.bytes_seconds * 1e3,
                one.issue_seconds * 1e3,
                one.share_of,
                one.share,
            )
            for one in predictions
        ],
    )


def build_parser(description: str | None, step_help: str) -> argparse.ArgumentParser:
    """Options of a prediction: the GPU's, a decode step, and where the JSON goes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = Gpu()
    parser.add_argument(
        "--bandwidth", type=float, default=gpu.bandwidth, help="of a copy, bytes/s"
    )
    parser.add_argument(
        "--issue-share", type=float, default=gpu.issue_share, help="of all cycles"
    )
    parser.add_argument("--step-ms", type=float, default=10.0, help=step_help)
    parser.set_defaults(plot=None)
    parser.add_argument("--output", type=common.Path, help="also write the JSON here")
    return parser


def run(
    parser: argparse.ArgumentParser,
    make: Callable[[Gpu, Model, float], Sequence[Any]],
    form: Callable[[Any], str],
) -> None:
    """Predict with what the command line says, show a table, write a result.

    Args:
        make: predictions (dataclasses) from a GPU, a model and seconds of a step.
        form: their table.
    """
    args = parser.parse_args()
    common.check_result_options(args)
    gpu = Gpu(bandwidth=args.bandwidth, issue_share=args.issue_share)
    made = make(gpu, Model(), args.step_ms / 1e3)
    common.say(form(made))
    result: dict[str, Any] = {
        "predicted": [asdict(one) for one in made],
        "gpu": asdict(gpu),
        "model": asdict(Model()),
    }
    common.write_result(args, result, draw=lambda *_: None)


def main() -> None:
    parser = build_parser(__doc__, "what a decode step takes")
    run(parser, predict_all, format_predictions)


if __name__ == "__main__":
    sys.exit(common.run_main(main))
