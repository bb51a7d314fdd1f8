# SPDX-License-Identifier: Apache-2.0
"""Loads the C++ operators (csrc/cpu) and tells torch.compile about their results."""

from typing import Any

import torch

try:
    from keyformer_vllm import _C  # type: ignore[attr-defined]  # noqa: F401
except ImportError as error:
    raise RuntimeError(
        "the native extension keyformer_vllm._C cannot be loaded "
        f"({error}); build it with `python setup.py build_ext --inplace` or "
        "`pip install --no-build-isolation .` in the environment of the engine"
    ) from error

ISAS = ("auto", "baseline", "avx2", "avx512", "avx512bf16")

_LAYOUT_NUMBER = {"vec": 0, "vec16": 0, "amx": 1}


def score_keys(*args: Any) -> None:
    *rest, layout = args
    torch.ops.keyformer.score_keys.default(*rest, _layout_number(layout))


def paged_attention_scored(*args: Any) -> None:
    *rest, layout = args
    torch.ops.keyformer.paged_attention_scored.default(*rest, _layout_number(layout))


def paged_attention_audited(*args: Any) -> None:
    *rest, layout = args
    torch.ops.keyformer.paged_attention_audited.default(*rest, _layout_number(layout))


def reset_slots(*args: Any) -> None:
    torch.ops.keyformer.reset_slots.default(*args)


def renumber_slots(*args: Any) -> None:
    torch.ops.keyformer.renumber_slots.default(*args)


def select_keep(*args: Any) -> torch.Tensor:
    keep: torch.Tensor = torch.ops.keyformer.select_keep.default(*args)
    return keep


def compact_kv(*args: Any) -> None:
    *rest, layout = args
    torch.ops.keyformer.compact_kv.default(*rest, _layout_number(layout))


def exchange_kv(*args: Any) -> None:
    *rest, layout = args
    torch.ops.keyformer.exchange_kv.default(*rest, _layout_number(layout))


def set_isa(isa: str) -> None:
    """Force the instruction set of the scoring kernels for the whole process.

    Args:
        isa: "auto" (the best this CPU has), "baseline", "avx2", "avx512" or
            "avx512bf16".

    Raises:
        RuntimeError: if the CPU lacks it.
    """
    torch.ops.keyformer.set_cpu_isa(ISAS.index(isa))


def has_isa(isa: str) -> bool:
    """Whether this CPU can run the kernels of `isa`."""
    return bool(torch.ops.keyformer.has_cpu_isa(ISAS.index(isa)))


def active_isa() -> str:
    """Name of the instruction set that the scoring kernels use now."""
    return str(torch.ops.keyformer.cpu_isa())


def draw_noise(
    positions: torch.Tensor,
    noise_key: int,
    layer: int,
    query_head: int,
    query_position: int,
    *,
    gumbel: bool,
) -> torch.Tensor:
    """Noise of one query row as the kernels draw it, for tests against core.noise.

    Args:
        positions: [num_keys] int32 key positions.
        gumbel: Gumbel noise, or the exponential draws behind it.

    Returns:
        [num_keys] float32.
    """
    noise: torch.Tensor = torch.ops.keyformer.draw_noise(
        positions, noise_key, layer, query_head, query_position, gumbel
    )
    return noise


def _layout_number(layout: str) -> int:
    number = _LAYOUT_NUMBER.get(layout)
    if number is None:
        raise ValueError(
            f"layout must be one of {', '.join(_LAYOUT_NUMBER)}, got {layout!r}"
        )
    return number


def _returns_nothing(*args: Any) -> None:
    """The operator only mutates its arguments."""


def _fake_select_keep(
    score: torch.Tensor, position: torch.Tensor, block_table: torch.Tensor, *args: Any
) -> torch.Tensor:
    max_kv_len = args[-3]
    num_layers, _, num_kv_heads, _ = score.shape
    size = (num_layers, block_table.shape[0], num_kv_heads, max_kv_len)
    return score.new_empty(size, dtype=torch.bool)


for _name in (
    "score_keys",
    "paged_attention_scored",
    "paged_attention_audited",
    "reset_slots",
    "renumber_slots",
    "compact_kv",
    "exchange_kv",
):
    torch.library.register_fake(f"keyformer::{_name}", _returns_nothing)
torch.library.register_fake("keyformer::select_keep", _fake_select_keep)
