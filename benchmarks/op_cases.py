# SPDX-License-Identifier: Apache-2.0
"""The calls that bench_ops.py times, on a cache that vLLM's own operator filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from keyformer_vllm import ops
from keyformer_vllm.adapters import compat
from keyformer_vllm.ops.layout import allocate_cache, side_views

SINKS = 4
RECENT_SHARE = 0.2
LAST_QUERIES = 32
STRIDE = 4


@dataclass(frozen=True)
class Shape:
    """Attention of one model; `num_layers` of them are measured one after another."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    num_layers: int


SHAPES = {
    "smollm2": Shape(9, 3, 64, 30),
    # Fewer layers than such a model has: they all cost the same.
    "8b": Shape(32, 8, 128, 4),
}


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Args:
        num_bytes: what has to be read and written at least, all layers together.
        baseline: case of the same group that it is compared with.
        steps: decode steps that one run serves; the time is divided by it before it
            is compared with a baseline that serves one step.
    """

    name: str
    run: Callable[[], object]
    num_bytes: int
    baseline: str | None = None
    steps: int = 1


@dataclass
class Batch:
    """Requests of equal length in a paged cache of `shape.num_layers` layers."""

    shape: Shape
    target: Target
    layout: str
    kv_cache: torch.Tensor  # [num_layers, num_blocks, num_kv_heads, block_size, 2*D]
    block_table: torch.Tensor  # [num_reqs, blocks per request] int32
    kv_lens: torch.Tensor  # [num_reqs] int32

    def __post_init__(self) -> None:
        self.score, self.position = side_views(self.kv_cache)

    @property
    def num_reqs(self) -> int:
        return len(self.kv_lens)

    @property
    def kv_len(self) -> int:
        return int(self.kv_lens[0])

    @property
    def block_size(self) -> int:
        return self.kv_cache.shape[3]

    @property
    def num_slots(self) -> int:
        """Slots that hold a token, counting each layer and KV head."""
        heads = self.shape.num_layers * self.shape.num_kv_heads
        return heads * self.num_reqs * self.kv_len

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token in one KV head."""
        return 2 * self.shape.head_size * self.kv_cache.element_size()

    def slots(self) -> torch.Tensor:
        """[num_reqs * kv_len] slots of all tokens, request after request."""
        index = torch.arange(self.kv_len, device=self.kv_cache.device)
        blocks = self.block_table.long()[:, index // self.block_size]
        return (blocks * self.block_size + index % self.block_size).flatten()

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer as vLLM's operators take them."""
        num_blocks, num_kv_heads, block_size, _ = self.kv_cache[layer].shape
        pages = self.kv_cache[layer].view(
            num_blocks, num_kv_heads, 2 * block_size, self.shape.head_size
        )
        key, value = pages.chunk(2, dim=2)
        return key, value

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, [num_blocks, block_size, num_kv_heads, head_size]."""
        pages = self.kv_cache[layer].transpose(1, 2)
        key, value = pages.chunk(2, dim=-1)
        return key, value

    def clone(self) -> Batch:
        """The same content in a storage of its own."""
        storage = self.kv_cache.untyped_storage().clone()
        empty = torch.empty(0, dtype=self.kv_cache.dtype, device=self.kv_cache.device)
        copy = empty.set_(
            storage, 0, tuple(self.kv_cache.shape), self.kv_cache.stride()
        )
        return Batch(
            *(self.shape, self.target, self.layout, copy),
            *(self.block_table, self.kv_lens),
        )


class Target:
    """Whose operators are timed, and vLLM's beside them.

    Args:
        impl: one of `ops.IMPLS`.
        device: where the tensors are.
    """

    def __init__(self, impl: str, device: str) -> None:
        self.impl, self.device = impl, torch.device(device)

    def layout(self, shape: Shape, dtype: torch.dtype, block_size: int) -> str:
        """The packing that vLLM chooses here."""
        raise NotImplementedError

    def writer(
        self, batch: Batch, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> Callable[[], None]:
        """vLLM's operator that stores tokens, in all layers.

        Args:
            key, value: [num_tokens, num_kv_heads, head_size].
            slots: [num_tokens] int64.
        """
        raise NotImplementedError

    def attention(self, rows: Rows) -> Callable[[], None]:
        """vLLM's attention in all layers, the work plan made once as in a step."""
        raise NotImplementedError


class CpuTarget(Target):
    """The C++ operators and vLLM's CPU attention."""

    def __init__(self) -> None:
        super().__init__("cpu", "cpu")

    def layout(self, shape: Shape, dtype: torch.dtype, block_size: int) -> str:
        return engine_layout(shape, dtype, block_size)

    def writer(
        self, batch: Batch, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> Callable[[], None]:
        def run() -> None:
            for layer in range(batch.shape.num_layers):
                compat.cpu_ops.cpu_attn_reshape_and_cache(
                    key, value, *batch.layer(layer), slots, batch.layout
                )

        return run

    def attention(self, rows: Rows) -> Callable[[], None]:
        batch, shape = rows.batch, rows.batch.shape
        plan = compat.cpu_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=batch.num_reqs,
            num_heads=shape.num_query_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_size,
            seq_lens=batch.kv_lens,
            dtype=batch.kv_cache.dtype,
            query_start_loc=rows.start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=batch.layout,
            enable_kv_split=compat.vllm_envs.VLLM_CPU_ATTN_SPLIT_KV,
        )

        def run() -> None:
            for layer in range(shape.num_layers):
                key, value = batch.layer(layer)
                compat.cpu_ops.cpu_attention_with_kv_cache(
                    query=rows.query,
                    key_cache=key,
                    value_cache=value,
                    output=rows.output,
                    query_start_loc=rows.start_loc,
                    seq_lens=batch.kv_lens,
                    scale=rows.scale,
                    causal=True,
                    alibi_slopes=None,
                    sliding_window=-1,
                    block_table=batch.block_table,
                    softcap=0.0,
                    scheduler_metadata=plan,
                    s_aux=None,
                )

        return run


class GpuTarget(Target):
    """CUDA or Triton operators and vLLM's FlashAttention.

    FlashAttention gets no work plan made ahead, and splits long sequences by its own
    rule, as it does in a step without CUDA graphs.
    """

    def layout(self, shape: Shape, dtype: torch.dtype, block_size: int) -> str:
        return "nhd"

    def writer(
        self, batch: Batch, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> Callable[[], None]:
        from vllm import _custom_ops

        one = torch.ones(1, device=self.device)

        def run() -> None:
            for layer in range(batch.shape.num_layers):
                _custom_ops.reshape_and_cache_flash(
                    key, value, *batch.rows(layer), slots, "auto", one, one
                )

        return run

    def attention(self, rows: Rows) -> Callable[[], None]:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
        from vllm.vllm_flash_attn.flash_attn_interface import FA3_AVAILABLE

        batch = rows.batch

        def run() -> None:
            for layer in range(batch.shape.num_layers):
                key, value = batch.rows(layer)
                flash_attn_varlen_func(
                    rows.query,
                    key,
                    value,
                    out=rows.output,
                    cu_seqlens_q=rows.start_loc,
                    max_seqlen_q=rows.num_rows,
                    seqused_k=batch.kv_lens,
                    max_seqlen_k=batch.kv_len,
                    softmax_scale=rows.scale,
                    causal=True,
                    block_table=batch.block_table,
                    fa_version=3 if FA3_AVAILABLE else 2,
                )

        return run


def engine_layout(shape: Shape, dtype: torch.dtype, block_size: int) -> str:
    """The packing that vLLM chooses on this CPU."""
    from vllm.v1.attention.backends import cpu_attn

    layout: str = cpu_attn._get_attn_isa(dtype, block_size, shape.head_size)
    if layout == "amx":
        torch.cpu._init_amx()  # outside a worker nobody else asks for the tiles
    return layout


def make_batch(
    shape: Shape,
    num_reqs: int,
    kv_len: int,
    block_size: int,
    dtype: torch.dtype,
    target: Target,
    seed: int = 0,
) -> Batch:
    """Random tokens in permuted blocks, every layer the same; block 0 stays null."""
    generator = torch.Generator().manual_seed(seed)
    device, layout = target.device, target.layout(shape, dtype, block_size)
    per_request = -(-kv_len // block_size)
    num_blocks = 1 + num_reqs * per_request
    kv_cache = allocate_cache(
        shape.num_layers,
        num_blocks,
        shape.num_kv_heads,
        block_size,
        shape.head_size,
        dtype,
        layout=layout,
    ).to(device)
    blocks = torch.randperm(num_blocks - 1, generator=generator) + 1
    batch = Batch(
        shape,
        target,
        layout,
        kv_cache,
        blocks.view(num_reqs, per_request).int().to(device),
        torch.full((num_reqs,), kv_len, dtype=torch.int32, device=device),
    )
    slots = batch.slots()
    size = (len(slots), shape.num_kv_heads, shape.head_size)
    key = torch.randn(size, generator=generator).to(device, dtype)
    value = torch.randn(size, generator=generator).to(device, dtype)
    positions = torch.arange(kv_len, device=device).repeat(num_reqs)
    scores = torch.rand(
        (shape.num_layers, len(slots), shape.num_kv_heads), generator=generator
    ).to(device)
    block, offset = slots // block_size, slots % block_size
    target.writer(batch, key, value, slots)()
    for layer in range(shape.num_layers):
        batch.position[layer][block, :, offset] = positions[:, None].int()
        batch.score[layer][block, :, offset] = scores[layer]
    return batch


@dataclass
class Rows:
    """The last `num_rows` tokens of every request, as queries."""

    batch: Batch
    num_rows: int

    def __post_init__(self) -> None:
        shape, num_reqs = self.batch.shape, self.batch.num_reqs
        size = (num_reqs * self.num_rows, shape.num_query_heads, shape.head_size)
        generator = torch.Generator().manual_seed(1)
        device = self.batch.kv_cache.device
        self.query = torch.randn(size, generator=generator).to(
            device, self.batch.kv_cache.dtype
        )
        self.output = torch.empty_like(self.query)
        starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
        self.start_loc = starts * self.num_rows
        first = self.batch.kv_len - self.num_rows
        own = first + torch.arange(self.num_rows, device=device)
        self.positions = own.repeat(num_reqs)
        self.noise_keys = torch.arange(1, num_reqs + 1, device=device)
        self.scale = shape.head_size**-0.5

    def attend(self) -> Callable[[], None]:
        """vLLM's attention in all layers."""
        return self.batch.target.attention(self)

    def score(self, tau: torch.Tensor, impl: str | None = None) -> Callable[[], None]:
        """score_keys in all layers; rows with tau 0 are left out."""
        batch, tau = self.batch, tau.to(self.batch.kv_cache.device)
        impl = impl or batch.target.impl

        def run() -> None:
            for layer in range(batch.shape.num_layers):
                ops.score_keys(
                    self.query,
                    *self._cache_arguments(layer),
                    tau,
                    self.noise_keys,
                    layer_index=layer,
                    first_query_head=0,
                    scale=self.scale,
                    soft_cap=0.0,
                    layout=batch.layout,
                    impl=impl,
                )

        return run

    def attend_scored(
        self, tau: torch.Tensor, impl: str | None = None
    ) -> Callable[[], None]:
        """paged_attention_scored in all layers."""
        batch, tau = self.batch, tau.to(self.batch.kv_cache.device)
        impl = impl or batch.target.impl

        def run() -> None:
            for layer in range(batch.shape.num_layers):
                ops.paged_attention_scored(
                    self.output,
                    self.query,
                    *self._cache_arguments(layer),
                    tau,
                    self.noise_keys,
                    None,
                    None,
                    layer_index=layer,
                    first_query_head=0,
                    scale=self.scale,
                    soft_cap=0.0,
                    layout=batch.layout,
                    impl=impl,
                )

        return run

    def _cache_arguments(self, layer: int) -> tuple[torch.Tensor, ...]:
        batch = self.batch
        return (
            batch.kv_cache[layer],
            batch.score[layer],
            batch.position[layer],
            batch.block_table,
            batch.kv_lens,
            self.start_loc,
            self.positions,
        )


def tau_of(num_rows: int, num_reqs: int, scored: slice) -> torch.Tensor:
    """Temperature 1 for the `scored` rows of each request, 0 (not scored) else."""
    tau = torch.zeros(num_reqs, num_rows)
    tau[:, scored] = 1.0
    return tau.flatten()


def decode_cases(batch: Batch) -> list[Case]:
    """What a decode step does per layer, and what scoring adds to it."""
    one, ring = Rows(batch, 1), Rows(batch, batch.block_size)
    item = batch.kv_cache.element_size()
    read_kv = batch.num_slots * batch.kv_bytes
    # K is read, the score read and written, the position read for the noise.
    read_k = batch.num_slots * (batch.kv_bytes // 2 + 3 * 4)
    tau = tau_of(1, batch.num_reqs, slice(None))
    ring_tau = tau_of(batch.block_size, batch.num_reqs, slice(None))
    written = batch.shape.num_layers * batch.num_reqs * batch.shape.num_kv_heads
    slots = batch.slots().view(batch.num_reqs, -1)[:, -1].contiguous()
    cases = [
        Case("attention (vLLM)", one.attend(), read_kv),
        Case("score_keys, 1 row", one.score(tau), read_k, "attention (vLLM)"),
        Case(
            f"score_keys, ring of {batch.block_size}",
            ring.score(ring_tau),
            read_k,
            "attention (vLLM)",
            batch.block_size,
        ),
    ]
    if batch.target.impl != "triton":  # which has no such kernel
        cases += [
            Case(
                "paged_attention_scored",
                one.attend_scored(tau),
                read_kv + batch.num_slots * 3 * 4,
                "attention (vLLM)",
            ),
            Case(
                "paged_attention_scored, no scores",
                one.attend_scored(torch.zeros_like(tau)),
                read_kv,
                "attention (vLLM)",
            ),
        ]
    store = "write K and V (vLLM)"
    size = (batch.num_reqs, batch.shape.num_kv_heads, batch.shape.head_size)
    token = torch.randn(size).to(batch.kv_cache.device, batch.kv_cache.dtype)
    write = batch.target.writer(batch, token, token, slots)
    cases += [
        Case(store, write, 2 * written * 2 * batch.shape.head_size * item),
        Case("reset_slots, 1 row", reset_all(batch, slots), written * 8, store),
    ]
    return cases


def prefill_cases(batch: Batch) -> list[Case]:
    """A whole prompt in one step, and what scoring all or some of it adds."""
    num_rows = batch.kv_len
    rows = Rows(batch, num_rows)
    read_kv = batch.num_slots * batch.kv_bytes
    read_k = batch.num_slots * (batch.kv_bytes // 2 + 3 * 4)
    name = "attention (vLLM)"

    def scoring(label: str, scored: slice) -> Case:
        tau = tau_of(num_rows, batch.num_reqs, scored)
        return Case(f"score_keys, {label}", rows.score(tau), read_k, name)

    return [
        Case(name, rows.attend(), read_kv),
        scoring("all", slice(None)),
        scoring(f"stride:{STRIDE}", slice((num_rows - 1) % STRIDE, None, STRIDE)),
        scoring(f"last:{LAST_QUERIES}", slice(-LAST_QUERIES, None)),
        Case("reset_slots", reset_all(batch, batch.slots()), batch.num_slots * 8, name),
    ]


def eviction_cases(batch: Batch, num_evict: int, label: str) -> list[Case]:
    """Selection and compaction of all requests and layers at once.

    They are held to the attention of one decode step over the same requests, which
    is less than the step.
    """
    name = "attention (vLLM)"
    select = select_all(batch, num_evict)
    keep = select()
    moved = int(keep[..., :num_evict].sum())
    return [
        Case(name, Rows(batch, 1).attend(), batch.num_slots * batch.kv_bytes),
        Case(f"select_keep, {label}", select, batch.num_slots * 9, name),
        Case(
            f"compact_kv, {label}",
            compact_all(batch, num_evict, keep),
            2 * moved * (batch.kv_bytes + 8) + keep.numel(),
            name,
        ),
    ]


def reset_all(
    batch: Batch, slots: torch.Tensor, impl: str | None = None
) -> Callable[[], None]:
    """reset_slots, which takes all layers at once."""
    positions = torch.arange(len(slots), device=slots.device)
    impl = impl or batch.target.impl

    def run() -> None:
        ops.reset_slots(batch.score, batch.position, slots, positions, impl=impl)

    return run


def select_all(
    batch: Batch, num_evict: int, impl: str | None = None
) -> Callable[[], torch.Tensor]:
    """select_keep for all requests, token by token and by score."""
    num_reqs, device = batch.num_reqs, batch.kv_cache.device
    impl = impl or batch.target.impl
    window = int(RECENT_SHARE * (batch.kv_len - num_evict))

    def full(value: int) -> torch.Tensor:
        return torch.full((num_reqs,), value, dtype=torch.int32, device=device)

    arguments: tuple[Any, ...] = (
        batch.score,
        batch.position,
        batch.block_table,
        batch.kv_lens,
        full(num_evict),
        full(SINKS),
        full(batch.kv_len - window),
        full(1),
        torch.zeros(num_reqs, dtype=torch.bool, device=device),
        torch.arange(1, num_reqs + 1, device=device),
    )
    return lambda: ops.select_keep(*arguments, max_kv_len=batch.kv_len, impl=impl)


def compact_all(
    batch: Batch, num_evict: int, keep: torch.Tensor, impl: str | None = None
) -> Callable[[], None]:
    """compact_kv for all requests; again and again the same moves."""
    impl = impl or batch.target.impl
    evicted = torch.full_like(batch.kv_lens, num_evict)
    return lambda: ops.compact_kv(
        batch.kv_cache,
        batch.score,
        batch.position,
        batch.block_table,
        batch.kv_lens,
        evicted,
        keep,
        layout=batch.layout,
        impl=impl,
    )
