# SPDX-License-Identifier: Apache-2.0
"""The operators over the paged cache, each with an explicit implementation.

`impl="reference"` is plain PyTorch, `impl="cpu"` the C++ extension, `impl="cuda"` the
CUDA one, and `impl="triton"` has all but `paged_attention_scored` in Triton. Nothing
chooses or falls back on its own. On a GPU only shapes, dtypes and strides are checked,
because reading a value would wait for the device; where a kernel finds a broken
promise, it stops the device.

Block tables and lengths are physical: the blocks freed so far are already shifted out,
and a `slot` of a request counts from its first block held.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

__all__ = [
    "IMPLS",
    "compact_kv",
    "exchange_kv",
    "paged_attention_audited",
    "paged_attention_scored",
    "renumber_slots",
    "require_impl",
    "reset_slots",
    "score_keys",
    "select_keep",
]

IMPLS = ("reference", "cpu", "cuda", "triton")

_loaded: dict[str, ModuleType] = {}


def require_impl(impl: str) -> None:
    """Load an implementation now: a missing one fails at start-up.

    Needed before torch.compile traces an operator: tracing cannot load a module.

    Args:
        impl: one of `IMPLS`.

    Raises:
        RuntimeError: if there is no such implementation, or it is not built.
    """
    _implementation(impl)


def score_keys(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_positions: torch.Tensor,
    tau: torch.Tensor,
    noise_keys: torch.Tensor,
    *,
    alibi_slopes: torch.Tensor | None = None,
    place: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    layer_index: int,
    first_query_head: int,
    scale: float,
    soft_cap: float,
    layout: str,
    impl: str,
) -> None:
    """Add the Keyformer score of each query row to the keys it sees.

    A row adds softmax_j((x_j + g_j) / tau), summed over the query heads of a KV head,
    with x the scaled, soft-capped, ALiBi-biased logit and g Gumbel noise; row r of a
    request with q rows sees slots [0, kv_len - q + r + 1). Rows are added one after the
    other in fp32, so the sum does not depend on chunking or batching. Paper: arXiv
    2403.09054, section 3.

    Args:
        query: [num_tokens, num_query_heads, head_size], dtype of the cache, after
            rotary embedding; rows may be strided.
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size] bf16, fp16 or
            fp32, packed as `layout` says; blocks may be padded. Holds the keys of this
            call's rows already.
        score: [num_blocks, num_kv_heads, block_size] float32. Mutated.
        position: int32, shape of `score`: logical position of the token in a slot.
        block_table: [num_reqs, max_blocks] int32.
        kv_lens: [num_reqs] int32, tokens in the cache, those of this call included.
        query_start_loc: [num_reqs + 1] int32, prefix sums of the rows per request.
        query_positions: [num_tokens] int64 logical positions.
        tau: [num_tokens] float32 temperature; rows with tau <= 0 are not scored.
        noise_keys: [num_reqs] int64, 0 for a request without noise.
        alibi_slopes: [num_query_heads] float32; adds slope * (stored position of the
            key - position of the query) to the logit, after the soft cap. None: no
            bias.
        place: int32, shape of `score`: as if tokens were renumbered, the bias is
            slope * (place of the key - place of the query), a query being the last of
            the keys it sees: number of these - 1. Noise stays keyed by `position`.
            None: the bias is taken from positions.
        sinks: [num_query_heads] float32; a logit per query head that adds
            exp(sink / tau), without noise, to the normaliser of its rows. None: none.
        layer_index: index of the layer in the model, for the noise.
        first_query_head: index of query head 0 in the model, for the noise.
        scale: factor of q . k.
        soft_cap: logits become cap * tanh(x / cap); 0 for none.
        layout: of the CPU ("vec", "vec16", "amx") or of a GPU ("nhd", "hnd"; any
            strides), see ops/layout.py.
        impl: one of `IMPLS`.

    Raises:
        ValueError: naming the argument and its value.
    """
    _operator("score_keys", impl)(
        query,
        kv_cache,
        score,
        position,
        block_table,
        kv_lens,
        query_start_loc,
        query_positions,
        tau,
        noise_keys,
        alibi_slopes,
        place,
        sinks,
        layer_index,
        first_query_head,
        scale,
        soft_cap,
        layout,
    )


def paged_attention_scored(
    output: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_positions: torch.Tensor,
    tau: torch.Tensor,
    noise_keys: torch.Tensor,
    alibi_slopes: torch.Tensor | None = None,
    place: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    layer_index: int,
    first_query_head: int,
    scale: float,
    soft_cap: float,
    layout: str,
    impl: str,
) -> None:
    """Attend and add the Keyformer scores, reading K and V once.

    The output is plain softmax attention, without noise or temperature, over the slots
    that a row sees. The logit is scale * q . k, then the soft cap, then the ALiBi bias
    slope * (stored position of the key - position of the query), or the same of places
    where these are given; an attention sink takes part in the softmax as a key without
    a value. All three as in vLLM's CPU kernel (csrc/cpu/cpu_attn_impl.hpp of vLLM
    0.32), which however derives the bias from the cache slot and so needs a cache that
    nothing was evicted from. Scores are those of `score_keys`, to the bit on a CPU.
    Made for decode steps: a request's rows are handled one after the other. On a GPU
    scratch is kept from call to call: 256 MiB at most, unless one row needs more, and
    what was outgrown, for the graphs that were captured with it.

    Args:
        output: [num_tokens, num_query_heads, head_size], dtype of `query`; rows may be
            strided. Mutated: rows of requests, whether scored or not.
        score: [num_blocks, num_kv_heads, block_size] float32. Mutated: rows with
            tau <= 0 attend without adding to it.

        The others: see `score_keys`.

    Raises:
        ValueError: naming the argument and its value.
    """
    _operator("paged_attention_scored", impl)(
        output,
        query,
        kv_cache,
        score,
        position,
        block_table,
        kv_lens,
        query_start_loc,
        query_positions,
        tau,
        noise_keys,
        alibi_slopes,
        place,
        sinks,
        layer_index,
        first_query_head,
        scale,
        soft_cap,
        layout,
    )


def paged_attention_audited(
    output: torch.Tensor,
    audit: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_positions: torch.Tensor,
    tau: torch.Tensor,
    noise_keys: torch.Tensor,
    front_blocks: torch.Tensor,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    layer_index: int,
    first_query_head: int,
    scale: float,
    soft_cap: float,
    layout: str,
    impl: str,
) -> None:
    """Attend all tokens, score as if the front were evicted, and tell what it gets.

    The front of a request are its leading blocks, to which `exchange_kv` has moved the
    tokens that would be gone. The output is that of `paged_attention_scored` over all
    slots; scores are those that it adds where the front is absent, to the bit for the
    same implementation.

    Args:
        output: [num_tokens, num_query_heads, head_size], dtype of `query`; rows may be
            strided. Mutated: rows of requests, whether scored or not.
        audit: [num_tokens, num_query_heads, 3] float32, contiguous. Mutated, the same
            rows: the share of the row's attention that the front gets, in [0, 1]; the
            squared norm of what its output would change by without the front; and the
            squared norm of its output.
        score: [num_blocks, num_kv_heads, block_size] float32. Mutated behind the front:
            rows with tau <= 0 attend without adding to it.
        front_blocks: [num_reqs] int32; the front ends before the request's queries.

        The others: see `score_keys`.

    Raises:
        ValueError: naming the argument and its value.
    """
    _operator("paged_attention_audited", impl)(
        output,
        audit,
        query,
        kv_cache,
        score,
        position,
        block_table,
        kv_lens,
        query_start_loc,
        query_positions,
        tau,
        noise_keys,
        front_blocks,
        alibi_slopes,
        sinks,
        layer_index,
        first_query_head,
        scale,
        soft_cap,
        layout,
    )


def reset_slots(
    score: torch.Tensor,
    position: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    *,
    impl: str,
) -> None:
    """Start the side data of newly given slots: score 0, the token's position.

    Args:
        score: [num_layers, num_blocks, num_kv_heads, block_size] float32. Mutated.
        position: int32, shape of `score`. Mutated.
        slot_mapping: [num_tokens] int64, block * block_size + offset; negative: skip.
        positions: [num_tokens] int64 logical positions.
        impl: one of `IMPLS`.

    Raises:
        ValueError: naming the argument and its value.
    """
    _operator("reset_slots", impl)(score, position, slot_mapping, positions)


def renumber_slots(
    place: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    impl: str,
) -> None:
    """Write the place of each token among those its KV head holds.

    That is its rank by position, 0 for the lowest: slots are not sorted, because
    `compact_kv` moves survivors into holes.

    Args:
        place: [num_layers, num_blocks, num_kv_heads, block_size] int32. Mutated: the
            slots of the requests.
        position: int32, shape of `place`.
        block_table: [num_reqs, max_blocks] int32, after the eviction.
        kv_lens: [num_reqs] int32, after the eviction.
        impl: one of `IMPLS`.

    Raises:
        ValueError: naming the argument and its value; also for a position that is
            negative or held twice.
    """
    _operator("renumber_slots", impl)(place, position, block_table, kv_lens)


def select_keep(
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_evict: torch.Tensor,
    num_sinks: torch.Tensor,
    recent_start: torch.Tensor,
    run_size: torch.Tensor,
    random: torch.Tensor,
    noise_keys: torch.Tensor,
    *,
    max_kv_len: int,
    first_layer: int = 0,
    first_kv_head: int = 0,
    impl: str,
) -> torch.Tensor:
    """Choose the survivors of an eviction, per layer, request and KV head.

    Sinks and recent tokens stay; of the rest the best by score, ties to the lower
    position, NaN last, so that exactly kv_len - num_evict stay.

    Args:
        score: [num_layers, num_blocks, num_kv_heads, block_size] float32.
        position: int32, shape of `score`.
        block_table: [num_reqs, max_blocks] int32.
        kv_lens: [num_reqs] int32, before the eviction.
        num_evict: [num_reqs] int32 tokens that go; 0 keeps all.
        num_sinks: [num_reqs] int32; positions below it stay.
        recent_start: [num_reqs] int32; positions from it on stay.
        run_size: [num_reqs] int32. 1 ranks tokens; above, runs of positions
            [i * run_size, (i + 1) * run_size) by the sum of their candidates' scores,
            the last run taken in part from its lower positions.
        random: [num_reqs] bool or uint8; rank by a uniform draw keyed (noise key,
            layer, KV head, position) instead of the score.
        noise_keys: [num_reqs] int64.
        max_kv_len: last dimension of the result, at least max(kv_lens).
        first_layer, first_kv_head: indices in the whole model of score[0] and of KV
            head 0, for the random draws.
        impl: one of `IMPLS`.

    Returns:
        keep: [num_layers, num_reqs, num_kv_heads, max_kv_len] bool over slots of the
        request, False beyond kv_len.

    Raises:
        ValueError: naming the argument and its value; also if sinks and recent
            tokens alone exceed what may stay.
    """
    keep: torch.Tensor = _operator("select_keep", impl)(
        score,
        position,
        block_table,
        kv_lens,
        num_evict,
        num_sinks,
        recent_start,
        run_size,
        random,
        noise_keys,
        max_kv_len,
        first_layer,
        first_kv_head,
    )
    return keep


def compact_kv(
    kv_cache: torch.Tensor,
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_evict: torch.Tensor,
    keep: torch.Tensor,
    *,
    layout: str,
    impl: str,
) -> None:
    """Move the survivors out of the freed front, all layers and heads at once.

    The survivors in slots [0, num_evict) fill, in order, the holes in
    [num_evict, kv_len); K, V, score and position move together. The front keeps its
    old bytes.

    Args:
        kv_cache: [num_layers, num_blocks, num_kv_heads, block_size, 2 * head_size],
            elements of 1, 2 or 4 bytes, packed as `layout` says. Mutated.
        score: [num_layers, num_blocks, num_kv_heads, block_size] float32. Mutated.
        position: int32, shape of `score`. Mutated.
        block_table: [num_reqs, max_blocks] int32, before the eviction.
        kv_lens: [num_reqs] int32, before the eviction.
        num_evict: [num_reqs] int32 tokens that go.
        keep: [num_layers, num_reqs, num_kv_heads, max_kv_len] bool, contiguous, from
            `select_keep`.
        layout: see `score_keys`.
        impl: one of `IMPLS`.

    Raises:
        ValueError: naming the argument and its value; also if `keep` does not
            hold kv_len - num_evict survivors.
    """
    _operator("compact_kv", impl)(
        kv_cache, score, position, block_table, kv_lens, num_evict, keep, layout
    )


def exchange_kv(
    kv_cache: torch.Tensor,
    score: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_evict: torch.Tensor,
    keep: torch.Tensor,
    *,
    layout: str,
    impl: str,
) -> None:
    """Part the survivors from the others and lose nothing.

    Survivors end up where `compact_kv` puts them; what lies in the hole that one fills
    goes to the slot it came from. So the front, slots [0, num_evict), holds the tokens
    that `compact_kv` would drop.

    Args and errors: see `compact_kv`.
    """
    _operator("exchange_kv", impl)(
        kv_cache, score, position, block_table, kv_lens, num_evict, keep, layout
    )


def _operator(name: str, impl: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(_implementation(impl), name, None)
    if found is None:
        raise RuntimeError(f"impl {impl!r} has no {name}")
    return found


def _implementation(impl: str) -> ModuleType:
    module = _loaded.get(impl)
    if module is None:
        if impl not in IMPLS:
            raise RuntimeError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
        # Loaded on first use: the reference must work where nothing was compiled.
        module = _loaded[impl] = import_module(f"{__name__}.{impl}")
    return module
