# SPDX-License-Identifier: Apache-2.0
"""Paged batches for the operator tests, packed by code that is not under test."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import torch

from keyformer_vllm.core import noise
from keyformer_vllm.ops.layout import page_bytes, side_views


@dataclass(frozen=True)
class BatchSpec:
    """Shapes of one case; `lens` holds (kv_len, query rows) of each request."""

    dtype: torch.dtype = torch.float32
    layout: str = "vec"
    num_query_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 32
    lens: tuple[tuple[int, int], ...] = ((113, 113),)
    num_layers: int = 1

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.num_query_heads}q{self.num_kv_heads}kv"
        return f"{dtype}-{self.layout}-{heads}-d{self.head_size}-b{self.block_size}"


INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
ROW_IMPLS = ("emulated", "cuda", "triton")
HALF_IMPLS = ("emulated", "cuda")
"""Whose `score_keys` holds weights in half precision until their row is summed."""
_ROWS_FOR = {"vec": "nhd", "vec16": "hnd", "amx": "hnd"}
_HEAD_SIZE_FOR = {32: 64, 112: 128}


def suited(spec: BatchSpec, impl: str) -> BatchSpec:
    """The case as `impl` knows it: rows for a GPU, a packed cache for the CPU."""
    if impl in ROW_IMPLS:
        return replace(spec, layout=_ROWS_FOR.get(spec.layout, spec.layout))
    if impl == "cpu" and spec.layout not in _ROWS_FOR:
        return replace(spec, layout="vec", block_size=max(32, spec.block_size))
    return spec


def suited_to_score(spec: BatchSpec, impl: str) -> BatchSpec:
    """As `suited`; a GPU scores 2-byte dtypes and some head sizes only."""
    if impl not in ROW_IMPLS:
        return suited(spec, impl)
    head_size = _HEAD_SIZE_FOR.get(spec.head_size, spec.head_size)
    dtype = torch.bfloat16 if spec.dtype == torch.float32 else spec.dtype
    if impl == "triton" and INTERPRETS:
        dtype = torch.float16  # its dot product takes the bits of bfloat16 for integers
    block_size = 64 if spec.block_size == 96 else spec.block_size  # a power of two
    changed = replace(spec, head_size=head_size, dtype=dtype, block_size=block_size)
    return suited(changed, impl)


@dataclass(frozen=True)
class Math:
    """What distinguishes one row's maths from another's."""

    noise_key: int = 0
    tau: float = 1.0
    soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    place: bool = False

    def optional(self, batch: PagedBatch) -> dict[str, torch.Tensor]:
        """The optional arguments.

        Keys are up to 1,000 tokens away: the slopes are flat enough that more than one
        key counts. Sinks have both signs.
        """
        num_query_heads = batch.spec.num_query_heads
        head = torch.arange(num_query_heads)
        made = {}
        if self.alibi:
            made["alibi_slopes"] = 2.0 ** (-4 - 8 * head / num_query_heads)
        if self.place:
            made["place"] = batch.place[0]
        if self.sinks:
            made["sinks"] = 4.0 * (-1.0) ** head + head
        return made


MATHS = {
    "plain": Math(),
    "noise": Math(noise_key=77),
    "noise-tau": Math(noise_key=-5, tau=1.7),
    "tau-cap": Math(tau=0.6, soft_cap=5.0),
    "alibi": Math(alibi=True),
    "alibi-places": Math(alibi=True, place=True),
    "noise-sinks": Math(noise_key=8, sinks=True),
    "noise-tau-cap-alibi-sinks": Math(12, 1.3, 4.0, True, True),
    "noise-tau-cap-alibi-sinks-places": Math(12, 1.3, 4.0, True, True, True),
}


@dataclass
class PagedBatch:
    """A packed cache, its side data, and the same tokens as plain tensors."""

    spec: BatchSpec
    raw: torch.Tensor  # the whole storage, int8
    kv_cache: torch.Tensor  # [num_layers, num_blocks, num_kv_heads, block_size, 2*D]
    score: torch.Tensor
    position: torch.Tensor
    place: torch.Tensor
    block_table: torch.Tensor
    kv_lens: torch.Tensor
    query: torch.Tensor
    query_start_loc: torch.Tensor
    query_positions: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)  # [layers, kv_len, H, D]
    values: list[torch.Tensor] = field(default_factory=list)

    def slots(self, request: int) -> torch.Tensor:
        """[kv_len] slots of a request."""
        size = self.spec.block_size
        index = torch.arange(int(self.kv_lens[request]))
        return self.block_table[request].long()[index // size] * size + index % size

    def side(self, tensor: torch.Tensor, request: int) -> torch.Tensor:
        """Score or position of a request: [num_layers, num_kv_heads, kv_len]."""
        block, offset = divmod_tensor(self.slots(request), self.spec.block_size)
        return tensor[:, block, :, offset].permute(1, 2, 0)

    def set_side(self, tensor: torch.Tensor, request: int, value: torch.Tensor) -> None:
        block, offset = divmod_tensor(self.slots(request), self.spec.block_size)
        tensor[:, block, :, offset] = value.permute(2, 0, 1).to(tensor.dtype)


def divmod_tensor(x: torch.Tensor, y: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x // y, x % y


def row_elements(layout: str, head_size: int, num_kv_heads: int) -> int:
    """From a token of a head to the next, where a token is one row, K | V."""
    return 2 * head_size * (num_kv_heads if layout == "nhd" else 1)


def head_offset(spec: BatchSpec, head: int) -> int:
    """Element offset of a KV head in its page."""
    return head * 2 * spec.head_size * (1 if spec.layout == "nhd" else spec.block_size)


def key_offsets(
    layout: str, block_size: int, head_size: int, num_kv_heads: int = 1
) -> torch.Tensor:
    """Element offset of K[t, d] from that of its head: [block_size, head_size]."""
    rows = []
    for t in range(block_size):
        if layout == "amx":
            base = (t // 16) * 16 * head_size + (t % 16) * 2
            row = [base + (d // 2) * 32 + d % 2 for d in range(head_size)]
        elif layout in ("nhd", "hnd"):
            base = t * row_elements(layout, head_size, num_kv_heads)
            row = [base + d for d in range(head_size)]
        else:
            row = [d * block_size + t for d in range(head_size)]
        rows.append(row)
    return torch.tensor(rows)


def value_offsets(
    layout: str, block_size: int, head_size: int, num_kv_heads: int = 1
) -> torch.Tensor:
    """Element offset of V[t, d], as `key_offsets`."""
    if layout in ("nhd", "hnd"):
        return key_offsets(layout, block_size, head_size, num_kv_heads) + head_size
    rows = []
    for t in range(block_size):
        if layout == "amx":
            base = (t // 2) * 32 + t % 2
            row = [
                base + (d // 16) * 16 * block_size + (d % 16) * 2
                for d in range(head_size)
            ]
        else:
            row = [t * head_size + d for d in range(head_size)]
        rows.append(row)
    return torch.tensor(rows) + block_size * head_size


def make_batch(spec: BatchSpec, seed: int = 0) -> PagedBatch:
    """Random tokens in permuted blocks; block 0 is the null block.

    Unused slots hold NaN keys and scores: whoever reads them shows it.
    """
    generator = torch.Generator().manual_seed(seed)
    block_size, head_size = spec.block_size, spec.head_size
    num_kv_heads, num_layers = spec.num_kv_heads, spec.num_layers
    used = [-(-kv_len // block_size) for kv_len, _ in spec.lens]
    num_blocks = 1 + sum(used) + 2
    element_size = spec.dtype.itemsize
    page = page_bytes(num_kv_heads, block_size, head_size, element_size)
    raw = torch.zeros(num_layers * num_blocks * page, dtype=torch.int8)
    width = 2 * head_size
    pages = raw.view(spec.dtype).view(num_layers, num_blocks, page // element_size)
    content = num_kv_heads * block_size * width
    flat = pages[:, :, :content]
    flat.fill_(float("nan"))
    if spec.layout == "nhd":
        by_token = flat.view(num_layers, num_blocks, block_size, num_kv_heads, width)
        kv_cache = by_token.transpose(2, 3)
    else:
        kv_cache = flat.view(num_layers, num_blocks, num_kv_heads, block_size, width)
    score, position = side_views(kv_cache)
    score.fill_(float("nan"))
    position.fill_(-1)

    blocks = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    block_table = torch.zeros(len(spec.lens), max(used) + 1, dtype=torch.int32)
    key_at = key_offsets(spec.layout, block_size, head_size, num_kv_heads)
    value_at = value_offsets(spec.layout, block_size, head_size, num_kv_heads)
    keys, values = [], []
    for request, (kv_len, _) in enumerate(spec.lens):
        own = [blocks.pop() for _ in range(used[request])]
        block_table[request, : len(own)] = torch.tensor(own, dtype=torch.int32)
        shape = (num_layers, kv_len, num_kv_heads, head_size)
        keys.append(torch.randn(shape, generator=generator).to(spec.dtype))
        values.append(torch.randn(shape, generator=generator).to(spec.dtype))
        for index, block in enumerate(own):
            tokens = slice(index * block_size, min(kv_len, (index + 1) * block_size))
            count = tokens.stop - tokens.start
            for at, source in ((key_at, keys[-1]), (value_at, values[-1])):
                for head in range(num_kv_heads):
                    place = head_offset(spec, head) + at[:count].flatten()
                    flat[:, block, place] = source[:, tokens, head].flatten(1)
    batch = PagedBatch(
        spec=spec,
        raw=raw,
        kv_cache=kv_cache,
        score=score,
        position=position,
        # Strided otherwise than the position; behind a request lies what nobody knows.
        place=torch.full((*position.shape[:-1], 96 + block_size), -(2**31)).int()[
            ..., 32 : 32 + block_size
        ],
        block_table=block_table,
        kv_lens=torch.tensor([kv for kv, _ in spec.lens], dtype=torch.int32),
        query=torch.empty(0),
        query_start_loc=torch.tensor(
            [0, *(q for _, q in spec.lens)], dtype=torch.int32
        ).cumsum(0, dtype=torch.int32),
        # Logical positions run ahead of slots, as after an eviction of 1,000 tokens.
        query_positions=torch.cat(
            [torch.arange(kv - q, kv) + 1000 for kv, q in spec.lens]
        ),
        keys=keys,
        values=values,
    )
    num_tokens = int(batch.query_start_loc[-1])
    # A slice of a fused QKV row: strided, like the engine's query.
    fused = torch.randn(
        num_tokens,
        spec.num_query_heads + 2 * num_kv_heads,
        head_size,
        generator=generator,
    ).to(spec.dtype)
    batch.query = fused[:, : spec.num_query_heads]
    for request, (kv_len, _) in enumerate(spec.lens):
        shape = (num_layers, num_kv_heads, kv_len)
        batch.set_side(batch.score, request, torch.zeros(shape))
        # Every head holds its own tokens, as after an eviction.
        per_head = [
            torch.randperm(kv_len + 1000, generator=generator)[:kv_len]
            for _ in range(num_layers * num_kv_heads)
        ]
        batch.set_side(batch.position, request, torch.stack(per_head).view(shape))
        ranks = [torch.randperm(kv_len, generator=generator) for _ in per_head]
        batch.set_side(batch.place, request, torch.stack(ranks).view(shape))
    return batch


def dense_scores(
    batch: PagedBatch,
    tau: torch.Tensor,
    noise_keys: torch.Tensor,
    *,
    layer_index: int,
    first_query_head: int,
    scale: float,
    soft_cap: float,
    dtype: torch.dtype,
    alibi_slopes: torch.Tensor | None = None,
    place: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    in_halves: bool = False,
) -> list[torch.Tensor]:
    """Scores of each request from its plain tensors: [num_kv_heads, kv_len].

    All arithmetic in `dtype`; only the noise is the one of core, in fp32, and weights
    are rounded to half precision if `in_halves`.
    """
    spec = batch.spec
    group = spec.num_query_heads // spec.num_kv_heads
    result = []
    for request, (kv_len, num_rows) in enumerate(spec.lens):
        begin = int(batch.query_start_loc[request])
        positions = batch.side(batch.position, request)[0]
        biased = positions if place is None else batch.side(place[None], request)[0]
        tokens = torch.arange(begin, begin + num_rows)
        scored = tokens[tau[tokens] > 0]
        sees = kv_len - num_rows + (scored - begin) + 1
        hidden = torch.arange(kv_len) >= sees[:, None]
        total = torch.zeros(spec.num_kv_heads, kv_len, dtype=dtype)
        for kv_head in range(spec.num_kv_heads if len(scored) else 0):
            key = batch.keys[request][0, :, kv_head].to(dtype)
            shares = torch.zeros(len(scored), kv_len, dtype=dtype)
            for query_head in range(kv_head * group, (kv_head + 1) * group):
                x = batch.query[scored, query_head].to(dtype) @ key.T * scale
                if soft_cap > 0:
                    x = soft_cap * torch.tanh(x / soft_cap)
                if alibi_slopes is not None:
                    here = batch.query_positions[scored] if place is None else sees - 1
                    distance = (biased[kv_head] - here[:, None]).to(dtype)
                    x = x + alibi_slopes[query_head].to(dtype) * distance
                if int(noise_keys[request]) != 0:
                    rows = noise.row_keys(
                        int(noise_keys[request]),
                        layer_index,
                        first_query_head + query_head,
                        batch.query_positions[scored, None],
                    )
                    x = x + noise.gumbel(rows, positions[kv_head]).to(dtype)
                x = (x / tau[scored, None].to(dtype)).masked_fill(hidden, -torch.inf)
                if sinks is not None:
                    sink = sinks[query_head].to(dtype) / tau[scored, None].to(dtype)
                    x = torch.cat([x, sink], dim=1)
                softmax = softmax_in_halves if in_halves else torch.softmax
                shares += softmax(x, dim=1)[:, :kv_len]
            for row in shares:  # one after the other, as the operators promise
                total[kv_head] += row
        result.append(total)
    return result


def softmax_in_halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax of weights that are half-precision numbers, at most 1 in each 64."""
    assert dim == 1
    shares, total = [], torch.zeros(len(x), 1, dtype=x.dtype)
    largest = x.amax(1, keepdim=True)
    for tile in x.split(64, dim=1):
        own = tile.amax(1, keepdim=True).clamp(min=torch.finfo(x.dtype).min)
        weights = (tile - own).exp().half().to(x.dtype)
        shares.append(weights * (own - largest).exp())
        total += shares[-1].sum(1, keepdim=True)
    return torch.cat(shares, 1) / total


def dense_attention(
    batch: PagedBatch,
    *,
    scale: float,
    soft_cap: float,
    dtype: torch.dtype,
    alibi_slopes: torch.Tensor | None = None,
    place: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain attention from the plain tensors: [num_tokens, num_query_heads, head_size].

    All arithmetic in `dtype`, products summed one dimension after the other.
    """
    spec = batch.spec
    group = spec.num_query_heads // spec.num_kv_heads
    output = torch.zeros(batch.query.shape, dtype=dtype)
    for request, (kv_len, num_rows) in enumerate(spec.lens):
        begin = int(batch.query_start_loc[request])
        tokens = slice(begin, begin + num_rows)
        key, value = (
            side[request][0].to(dtype).transpose(0, 1).repeat_interleave(group, dim=0)
            for side in (batch.keys, batch.values)
        )  # [num_query_heads, kv_len, head_size]
        query = batch.query[tokens].to(dtype).transpose(0, 1)
        x = torch.zeros(spec.num_query_heads, num_rows, kv_len, dtype=dtype)
        for d in range(spec.head_size):
            x += query[:, :, None, d] * key[:, None, :, d]
        x *= scale
        if soft_cap > 0:
            x = soft_cap * torch.tanh(x / soft_cap)
        sees = kv_len - num_rows + 1 + torch.arange(num_rows)
        if alibi_slopes is not None:
            if place is None:
                biased = batch.side(batch.position, request)[0]
                here = batch.query_positions[tokens]
            else:
                biased, here = batch.side(place[None], request)[0], sees - 1
            distance = biased[:, None] - here[:, None]
            distance = distance.repeat_interleave(group, dim=0).to(dtype)
            x = x + alibi_slopes.to(dtype)[:, None, None] * distance
        x = x.masked_fill(torch.arange(kv_len) >= sees[:, None], -torch.inf)
        if sinks is not None:
            column = sinks.to(dtype)[:, None, None].expand(-1, num_rows, 1)
            x = torch.cat([x, column], dim=-1)
        probability = torch.softmax(x, dim=-1)[..., :kv_len]
        output[tokens] = (probability @ value).transpose(0, 1)
    return output
