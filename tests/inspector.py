# SPDX-License-Identifier: Apache-2.0
"""Looks into a server from within, and breaks it on purpose; for tests only.

Loaded by the server itself from the path of the tests, so that the package needs no
door for it: ``--worker-extension-cls`` puts :class:`Inspector` beneath the worker,
whose methods ``/collective_rpc`` then calls, and ``--middleware`` lets
:func:`front_end` answer one path of its own.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.invariants import find_strings

FLAGS = (
    *("--worker-extension-cls", f"{__name__}.Inspector"),
    *("--middleware", f"{__name__}.front_end"),
)
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""vLLM offers ``/collective_rpc`` with this only."""
SHARED_PROCESS = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Puts the worker into the process of the engine, where it sees the scheduler; the
front end stays apart. On CPU vLLM otherwise gives the worker a process too."""
FRONT_END = "/tests/front_end"
PLANTED = "planted fault"

STAGES = {
    "scoring": "score_keys",
    "scored_attention": "paged_attention_scored",
    "selection": "select_keep",
    "compaction": "compact_kv",
}
"""What can be broken, and the operator that does it."""
MOMENTS = ("before", "midway", "after")
_LAYERED = ("score_keys", "paged_attention_scored")
"""Operators that are called for each layer; the others do all layers at once."""


class WithMarker:
    """All strings in which a marker stands."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self._marker in text


class Inspector:
    """What vLLM adds to the worker."""

    def look_inside(self, marker: str) -> dict[str, Any]:
        """Sizes of everything that belongs to requests, under ``SHARED_PROCESS``.

        Args:
            marker: stands in the id of each request that must be forgotten.
        """
        scheduler = _calling_scheduler()
        runtime = self.keyformer  # type: ignore[attr-defined]
        batch = self.model_runner.input_batch  # type: ignore[attr-defined]
        pool = scheduler.kv_cache_manager.block_pool
        queue = pool.free_block_queue
        free = [block.block_id for block in queue.get_all_free_blocks()]
        owned = [b.block_id for b in pool.blocks if b.ref_cnt and not b.is_null]
        ring = runtime.ring
        num_rows = scheduler.max_num_running_reqs
        return {
            "free": sorted(free),
            "num_free": pool.get_num_free_blocks(),
            "owned": owned,
            "num_blocks": pool.num_gpu_blocks,
            "tables": {
                "requests": len(scheduler.requests),
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "retentions": len(scheduler.retentions),
                "request_params": len(scheduler.request_params),
                "evicted_blocks": len(scheduler.evicted_blocks),
                "accounts": len(scheduler.accounting.requests),
                "reported": len(scheduler.accounting.reported),
                "blocks": len(scheduler.kv_manager.req_to_blocks),
                "worker": len(runtime.table),
                "batch": len(batch.req_ids),
                "ring": 0 if ring is None else num_rows - ring.num_free,
            },
            "remembered": find_strings(
                {"scheduler": scheduler, "worker": self}, WithMarker(marker)
            ),
        }

    def plant_fault(self, stage: str, moment: str) -> None:
        """Make one operator raise from now on.

        Args:
            stage: key of ``STAGES``.
            moment: one of ``MOMENTS``; midway is after the first layer.
        """
        from keyformer_vllm import ops

        name = STAGES[stage]
        setattr(ops, name, _faulty(name, getattr(ops, name), moment))


def _calling_scheduler() -> Any:
    """The scheduler of the engine that is calling; vLLM hides it from the collector."""
    frame = sys._getframe()
    while frame is not None:
        scheduler = getattr(frame.f_locals.get("self"), "scheduler", None)
        if scheduler is not None:
            return scheduler
        frame = frame.f_back
    raise RuntimeError("the worker does not run in the process of the engine")


def _faulty(name: str, stock: Any, moment: str) -> Any:
    def operator(*args: Any, **kwargs: Any) -> Any:
        if name in _LAYERED:
            layer = kwargs["layer_index"]
            if moment == "after" or (moment == "midway" and layer == 0):
                stock(*args, **kwargs)
            if moment == "midway" and layer == 0:
                return
        elif moment == "midway":
            stock(*_first_layer(name, args), **kwargs)
        elif moment == "after":
            stock(*args, **kwargs)
        raise RuntimeError(f"{PLANTED} {moment} {name}")

    return operator


def _first_layer(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of an operator for all layers, cut to the first of them."""
    if name == "select_keep":
        score, position, *rest = args
        return score[:1], position[:1], *rest
    kv_pages, score, position, *rest, keep = args
    return kv_pages[:1], score[:1], position[:1], *rest, keep[:1]


async def front_end(request: Any, call_next: Any) -> Any:
    """ASGI middleware: requests that the front end remembers, at ``FRONT_END``."""
    if request.url.path != FRONT_END:
        return await call_next(request)
    from starlette.responses import JSONResponse

    processor = request.app.state.engine_client.output_processor
    marker = WithMarker(request.query_params["marker"])
    return JSONResponse(
        {
            "requests": len(processor.request_states),
            "parents": len(processor.parent_requests),
            "remembered": find_strings({"output_processor": processor}, marker),
        }
    )
