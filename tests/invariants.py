# SPDX-License-Identifier: Apache-2.0
"""What must hold for an engine that has nothing to do."""

from __future__ import annotations

from collections.abc import Container, Iterable
from types import ModuleType
from typing import Any

from tests.engine import Engine

_OURS = ("vllm.", "keyformer_vllm.")


def assert_idle(engine: Engine, request_ids: Iterable[str] = ()) -> None:
    """Every block is back, once, and no table knows any of the requests.

    Args:
        request_ids: engine ids of finished requests that must be forgotten.
    """
    assert not engine.busy
    assert_pool_whole(engine)
    assert not any(engine.manager.req_to_blocks.values())
    assert not engine.manager.num_cached_block
    assert not engine.scheduler.requests and not engine.scheduler.running
    remembered = find_strings(
        {
            "scheduler": engine.scheduler,
            "worker": engine.worker,
            "output_processor": engine.llm_engine.output_processor,
        },
        set(request_ids),
    )
    assert not remembered, remembered


def assert_pool_whole(engine: Engine) -> None:
    """All blocks but the null block are free; the queue and its counter agree."""
    pool = engine.block_pool
    queue = pool.free_block_queue
    walked = [block.block_id for block in queue.get_all_free_blocks()]
    assert len(walked) == queue.num_free_blocks == pool.get_num_free_blocks()
    assert len(set(walked)) == len(walked), "a block is in the free queue twice"
    null_id = pool.null_block.block_id
    assert null_id not in walked
    assert set(walked) | {null_id} == set(range(pool.num_gpu_blocks)), "a block is lost"
    counts = {b.block_id: b.ref_cnt for b in pool.blocks if not b.is_null and b.ref_cnt}
    assert not counts, f"free blocks with owners: {counts}"


def assert_pool_consistent(engine: Engine) -> None:
    """While requests run: each block is free or held, by one request, once."""
    pool = engine.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    held = [
        block.block_id
        for blocks in engine.manager.req_to_blocks.values()
        for block in blocks
        if not block.is_null
    ]
    assert len(free) == pool.get_num_free_blocks()
    everything = [*free, *held, pool.null_block.block_id]
    assert sorted(everything) == list(range(pool.num_gpu_blocks))


def find_strings(roots: dict[str, Any], wanted: Container[str]) -> list[str]:
    """Where any of the strings is reachable: keys, items and attributes.

    Follows containers and objects of vLLM and of this package, nothing else.

    Returns:
        Paths such as ``scheduler.retentions['r7-1a2b3c4d']``.
    """
    found: list[str] = []
    seen: set[int] = set()
    stack = list(roots.items())
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            if value in wanted:
                found.append(path)
            continue
        if id(value) in seen or isinstance(value, (type, ModuleType)):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            for key, item in value.items():
                stack.append((f"{path}.keys({key!r})", key))
                stack.append((f"{path}[{key!r}]", item))
        elif (
            isinstance(value, (list, tuple, set, frozenset))
            or type(value).__module__ == "collections"
        ):
            stack.extend((f"{path}[{i}]", item) for i, item in enumerate(value))
        elif type(value).__module__.startswith(_OURS):
            attributes = getattr(value, "__dict__", {})
            stack.extend((f"{path}.{name}", item) for name, item in attributes.items())
    return found
