# SPDX-License-Identifier: Apache-2.0
"""The caches of vLLM 0.32: where a token's K, V and side data lie.

A page holds one block of one layer::

    [ KV head 0: K | V ][ KV head 1: K | V ] ...
    [ scores ][ positions ][ places, where they are held ][ padding ]

K and V of a head are packed for the instruction set of the attention kernel
(vllm/v1/attention/backends/cpu_attn.py, csrc/cpu/cpu_attn_*.hpp). With t the token in
the block, d the dimension, N the block size, D the head size, the element offsets are

    vec, vec16:  K  d*N + t
                 V  t*D + d
    amx:         K  (t//16)*16*D + (d//2)*32 + (t%16)*2 + d%2
                 V  (d//16)*16*N + (t//2)*32 + (d%16)*2 + t%2

On a GPU a token of one head is one row, K | V, and strides say where the rows lie:

    hnd          [ head 0: token 0, token 1, ... ][ head 1: ... ] ...     (LBHNC)
    nhd          [ token 0: head 0, head 1, ... ][ token 1: ... ] ...     (LBNHC)

The side data (fp32 scores, int32 positions and places, each [num_kv_heads, block_size])
is ours; vLLM accounts for it as padding of the page.
"""

from collections.abc import Callable

import torch

LAYOUTS = ("vec", "vec16", "amx")  # of the CPU
ROW_LAYOUTS = ("nhd", "hnd")  # of vLLM's GPU backends
PAGE_ALIGNMENT = 64  # bytes; keeps the rows of every page aligned for vector loads
SIDE_BYTES_PER_SLOT = 8  # fp32 score + int32 position, per slot and KV head
PLACE_BYTES_PER_SLOT = 4  # int32 place, only with compact positions
BLOCK_SIZE_MULTIPLE = 32
HEAD_SIZE_MULTIPLE = 16

WriteFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def row_layout_number(layout: str) -> int:
    """The number that the C++ code knows a row layout by; the strides say the rest.

    Raises:
        ValueError: if it is none.
    """
    if layout not in ROW_LAYOUTS:
        raise ValueError(
            f"layout must be one of {', '.join(ROW_LAYOUTS)}, got {layout!r}"
        )
    return 2


def check_layout(
    layout: str, element_size: int, block_size: int, head_size: int
) -> None:
    """Refuse a cache that this file does not describe.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    if layout not in (*LAYOUTS, *ROW_LAYOUTS):
        raise ValueError(
            f"layout must be one of {', '.join((*LAYOUTS, *ROW_LAYOUTS))}, "
            f"got {layout!r}"
        )
    multiple = 16 if layout in ROW_LAYOUTS else BLOCK_SIZE_MULTIPLE
    if block_size <= 0 or block_size % multiple != 0:
        raise ValueError(
            f"block_size must be a multiple of {multiple}, got {block_size}"
        )
    if head_size <= 0 or head_size % HEAD_SIZE_MULTIPLE != 0:
        raise ValueError(
            f"head_size must be a multiple of {HEAD_SIZE_MULTIPLE}, got {head_size}"
        )
    if layout == "amx" and element_size != 2:
        raise ValueError(
            f"layout 'amx' packs 2-byte elements, the cache has {element_size}"
        )


def side_bytes(num_kv_heads: int, block_size: int, has_places: bool = False) -> int:
    """Bytes of scores, positions and, if asked for, places in one page."""
    per_slot = SIDE_BYTES_PER_SLOT + PLACE_BYTES_PER_SLOT * has_places
    return num_kv_heads * block_size * per_slot


def page_bytes(
    num_kv_heads: int,
    block_size: int,
    head_size: int,
    element_size: int,
    has_places: bool = False,
) -> int:
    """Bytes of one page with side data, padded to `PAGE_ALIGNMENT`."""
    content = num_kv_heads * block_size * 2 * head_size * element_size
    content += side_bytes(num_kv_heads, block_size, has_places)
    return -(-content // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def side_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View the scores and positions in the padded tail of every page.

    Args:
        kv_cache: [..., num_blocks, num_kv_heads, block_size, 2 * head_size] with or
            without a leading layer dimension, any dtype; strided, its pages padded.
            In a page, tokens of a head or heads of a token may lie side by side.

    Returns:
        score float32 and position int32, both [..., num_blocks, num_kv_heads,
        block_size], sharing the storage of `kv_cache`.

    Raises:
        ValueError: if the pages have no room for them.
    """
    score, position = _side_views(kv_cache, (torch.float32, torch.int32))
    return score, position


def check_page(kv_pages: torch.Tensor, has_places: bool) -> None:
    """Check that pages lie as far apart as they were planned.

    Args:
        kv_pages: [num_layers, num_blocks, num_kv_heads, block_size, 2 * head_size].
        has_places: whether slots also carry a place.

    Raises:
        RuntimeError: if they do not.
    """
    *_, num_kv_heads, block_size, width = kv_pages.shape
    element_size = kv_pages.element_size()
    page = page_bytes(num_kv_heads, block_size, width // 2, element_size, has_places)
    found = kv_pages.stride(1) * element_size
    if found != page:
        raise RuntimeError(
            f"KV pages are {found} bytes apart, side data was planned for {page}"
        )


def place_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """View the places behind the positions of every page.

    Args:
        kv_cache: see `side_views`; pages of `page_bytes(..., has_places=True)`.

    Returns:
        int32, shape and strides of the position that `side_views` returns.

    Raises:
        ValueError: if the pages have no room for them.
    """
    types = (torch.float32, torch.int32, torch.int32)
    return _side_views(kv_cache, types)[-1]


def _side_views(
    kv_cache: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> list[torch.Tensor]:
    """One view of 4-byte elements per dtype, one behind the other."""
    *lead, num_kv_heads, block_size, width = kv_cache.shape
    element_size = kv_cache.element_size()
    content = num_kv_heads * block_size * width * element_size
    by_head = (block_size * width, width, 1)
    by_token = (width, num_kv_heads * width, 1)
    if kv_cache.stride()[-3:] not in (by_head, by_token):
        raise ValueError(
            "kv_cache: a block must be contiguous, its strides are "
            f"{kv_cache.stride()[-3:]}, expected {by_head} or {by_token}"
        )
    lead_bytes = [stride * element_size for stride in kv_cache.stride()[:-3]]
    rows = num_kv_heads * block_size
    need = content + 4 * rows * len(dtypes)
    for size, stride in zip(lead, lead_bytes, strict=True):
        if size > 1 and stride < need:
            raise ValueError(
                f"kv_cache: pages of {stride} bytes have no room for side data, "
                f"which needs {need}"
            )
    start = kv_cache.storage_offset() * element_size + content
    stride = [*(b // 4 for b in lead_bytes), block_size, 1]
    size = [*lead, num_kv_heads, block_size]
    return [
        _view_storage(kv_cache, dtype, start // 4 + index * rows, size, stride)
        for index, dtype in enumerate(dtypes)
    ]


def key_view(kv_cache: torch.Tensor, layout: str) -> torch.Tensor:
    """View K so that tokens and dimensions can be indexed.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size].
        layout: of the CPU or of a GPU, see above.

    Returns:
        all but amx: [num_blocks, num_kv_heads, block_size, head_size];
        amx: [num_blocks, num_kv_heads, block_size/16, 16, head_size/2, 2], of which
        the middle and the last pair of dimensions are the token and the dimension.
    """
    return _token_view(kv_cache, layout, is_value=False)


def value_view(kv_cache: torch.Tensor, layout: str) -> torch.Tensor:
    """View V so that tokens and dimensions can be indexed.

    As `key_view`; amx: [num_blocks, num_kv_heads, block_size/2, 2, head_size/16, 16].
    """
    return _token_view(kv_cache, layout, is_value=True)


def key_and_value(
    kv_pages: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """All K and all V of pages, as they lie: tokens and dimensions may be packed.

    Args:
        kv_pages: [..., num_kv_heads, block_size, 2 * head_size].
        layout: of the CPU or of a GPU, see above.

    Returns:
        Two views that share the storage of `kv_pages`.
    """
    key, value = kv_pages.chunk(2, dim=-1 if layout in ROW_LAYOUTS else -2)
    return key, value


def read_tokens(view: torch.Tensor, slots: torch.Tensor, kv_head: int) -> torch.Tensor:
    """Gather token rows of one KV head from a `key_view` or `value_view`.

    Args:
        view: as returned by `key_view` or `value_view`.
        slots: [num_tokens] int64, block * block_size + offset.
        kv_head: index.

    Returns:
        [num_tokens, head_size], a copy.
    """
    return view[_token_index(view, slots, kv_head)].flatten(1)


def write_tokens(
    view: torch.Tensor, slots: torch.Tensor, kv_head: int, rows: torch.Tensor
) -> None:
    """Scatter `rows` [num_tokens, head_size] to `slots`; the inverse of read_tokens."""
    index = _token_index(view, slots, kv_head)
    view[index] = rows.reshape(rows.shape[0], *view.shape[view.dim() // 2 + 1 :])


def probe_layout(
    write_fn: WriteFn,
    *,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    layout: str,
    device: torch.device | str = "cpu",
) -> None:
    """Check at start-up that the engine packs its cache the way this file says.

    Writes random tokens into a small padded cache with the engine's own operator and
    reads them back through the views.

    Args:
        write_fn: write_fn(key, value, kv_cache, slot_mapping) with key and value
            [num_tokens, num_kv_heads, head_size], kv_cache [num_blocks, num_kv_heads,
            block_size, 2 * head_size] (padded pages) and slot_mapping [num_tokens]
            int64; stores the tokens.

    Raises:
        RuntimeError: if a token reads back differently, or the side data was touched.
    """
    itemsize = dtype.itemsize
    check_layout(layout, itemsize, block_size, head_size)
    num_blocks = 4
    size = (1, num_blocks, num_kv_heads, block_size, head_size)
    kv_cache = allocate_cache(*size, dtype, layout=layout, device=device)[0]
    score, position = side_views(kv_cache)
    score.fill_(1.5)
    position.fill_(-7)
    generator = torch.Generator().manual_seed(0)
    # Block 0 stays empty, like the engine's null block; one token is left out.
    num_tokens = (num_blocks - 1) * block_size - 1
    slots = torch.randperm(num_tokens, generator=generator).to(device) + block_size
    shape = (num_tokens, num_kv_heads, head_size)
    key = torch.randn(shape, generator=generator).to(device, dtype)
    value = torch.randn(shape, generator=generator).to(device, dtype)
    write_fn(key, value, kv_cache, slots)
    for name, tokens, view in (
        ("K", key, key_view(kv_cache, layout)),
        ("V", value, value_view(kv_cache, layout)),
    ):
        for kv_head in range(num_kv_heads):
            if not torch.equal(read_tokens(view, slots, kv_head), tokens[:, kv_head]):
                raise RuntimeError(
                    f"the engine does not store {name} in the layout {layout!r} that "
                    f"keyformer_vllm expects (dtype {dtype}, head size {head_size}, "
                    f"block size {block_size}); refusing to move tokens. This vLLM "
                    "version or CPU is not supported."
                )
    if not (bool((score == 1.5).all()) and bool((position == -7).all())):
        raise RuntimeError(
            f"the engine's cache operator writes into the padding of a page (layout "
            f"{layout!r}, dtype {dtype}), where scores and positions live"
        )


def allocate_cache(
    num_layers: int,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    *,
    has_places: bool = False,
    layout: str = "hnd",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Allocate zeroed pages with room for side data, as the engine lays them out.

    Args:
        layout: "nhd" puts the heads of a token side by side; all others the tokens of
            a head.

    Returns:
        [num_layers, num_blocks, num_kv_heads, block_size, 2 * head_size] of `dtype`,
        block-padded view of one storage.
    """
    page = page_bytes(num_kv_heads, block_size, head_size, dtype.itemsize, has_places)
    num_bytes = num_layers * num_blocks * page
    raw = torch.zeros(num_bytes, dtype=torch.int8, device=device)
    page_elements = page // dtype.itemsize
    width = 2 * head_size
    by_head = (block_size * width, width, 1)
    by_token = (width, num_kv_heads * width, 1)
    return raw.view(dtype).as_strided(
        (num_layers, num_blocks, num_kv_heads, block_size, width),
        (
            num_blocks * page_elements,
            page_elements,
            *(by_token if layout == "nhd" else by_head),
        ),
    )


def _view_storage(
    like: torch.Tensor,
    dtype: torch.dtype,
    offset: int,
    size: list[int],
    stride: list[int],
) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device=like.device)
    return empty.set_(like.untyped_storage(), offset, size, stride)


def _token_view(kv_cache: torch.Tensor, layout: str, is_value: bool) -> torch.Tensor:
    num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    head_size = width // 2
    check_layout(layout, kv_cache.element_size(), block_size, head_size)
    if layout in ROW_LAYOUTS:
        return kv_cache[..., head_size:] if is_value else kv_cache[..., :head_size]
    block_stride, head_stride = kv_cache.stride()[:2]
    inner_size: tuple[int, ...]
    inner_stride: tuple[int, ...]
    if layout != "amx":
        inner_size = (block_size, head_size)
        inner_stride = (head_size, 1) if is_value else (1, block_size)
    elif is_value:
        inner_size = (block_size // 2, 2, head_size // 16, 16)
        inner_stride = (32, 1, 16 * block_size, 2)
    else:
        inner_size = (block_size // 16, 16, head_size // 2, 2)
        inner_stride = (16 * head_size, 2, 32, 1)
    offset = kv_cache.storage_offset() + is_value * block_size * head_size
    return kv_cache.as_strided(
        (num_blocks, num_kv_heads, *inner_size),
        (block_stride, head_stride, *inner_stride),
        offset,
    )


def _token_index(
    view: torch.Tensor, slots: torch.Tensor, kv_head: int
) -> tuple[torch.Tensor | int, ...]:
    if view.dim() == 4:
        block_size = view.shape[2]
        return slots // block_size, kv_head, slots % block_size
    inner = view.shape[3]
    block_size = view.shape[2] * inner
    offset = slots % block_size
    return slots // block_size, kv_head, offset // inner, offset % inner
