# SPDX-License-Identifier: Apache-2.0
"""One configuration of the GPU adapters, from requests to proofs.

To be run in a process of its own, where vLLM's platform is CUDA, real or not:

    python -m tests.gpu_driver --runner V2 --graphs FULL --scheduling async

Prints one line that starts with RESULT; the exit status says whether all held.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

RUNNERS = ("V2", "V1")
GRAPHS = ("eager", "PIECEWISE", "FULL", "both")
SCHEDULINGS = ("async", "sync")
ATTENTIONS = ("FLASH_ATTN", "TRITON_ATTN")
SIZES = [1, 2, 4, 8]
"""Batch sizes of captured graphs; batches of 3 and 5 to 7 requests are padded."""
MAX_TOKENS = 90


def graph_settings(graphs: str) -> dict[str, Any]:
    """``EngineArgs`` of a graph mode.

    Args:
        graphs: one of ``GRAPHS``; FULL captures whole decode steps, without
            torch.compile.
    """
    if graphs == "eager":
        return {"eager": True}
    modes = {"FULL": "FULL_DECODE_ONLY", "both": "FULL_AND_PIECEWISE"}
    compilation: dict[str, Any] = {
        "cudagraph_mode": modes.get(graphs, graphs),
        "cudagraph_capture_sizes": SIZES,
    }
    if graphs == "FULL":
        compilation["mode"] = 0
    return {"eager": False, "compilation_config": compilation}


def count_replays(counts: Counter[str]) -> None:
    """Count captures and replays of CUDA graphs from now on."""
    import torch

    for name in ("capture_end", "replay"):
        stock = getattr(torch.cuda.CUDAGraph, name)

        def counted(self: Any, *args: Any, name: str = name, stock: Any = stock) -> Any:
            counts[name] += 1
            return stock(self, *args)

        setattr(torch.cuda.CUDAGraph, name, counted)


def count_arrivals(counts: Counter[str]) -> None:
    """Add up what workers count and schedulers receive from now on."""
    from keyformer_vllm.adapters import compat

    stock = compat.take_step_counts

    def counted(carrier: Any) -> dict[str, int]:
        taken = stock(carrier)
        counts.update(taken)
        return taken

    compat.take_step_counts = counted


def run(options: argparse.Namespace, folder: Path) -> str:
    """Serve a mixed batch and check all of it; returns what was seen."""
    import torch
    from vllm.platforms import current_platform

    from tests.e2e import test_kept_sets, test_masked_reference
    from tests.e2e.conftest import POLICY
    from tests.engine import open_engine, random_prompt
    from tests.hf_reference import HFReference
    from tests.models import write_model

    assert current_platform.is_cuda(), "vLLM's platform is not CUDA here"
    if options.dtype == "float32" and options.attention == "FLASH_ATTN":
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

        # Where its kernel is torch, exact enough to compare what is kept.
        FlashAttentionBackend.supported_dtypes.append(torch.float32)
    counts: Counter[str] = Counter()
    count_replays(counts)
    arrived: Counter[str] = Counter()
    count_arrivals(arrived)
    model = write_model("llama-4-2", folder / "llama-4-2")
    policy = POLICY | {"poison_freed": True, "score_mode": options.score_mode}
    if options.kernels == "reference":
        policy["reference_kernels"] = True
    else:
        policy["kernels"] = options.kernels
    with open_engine(
        model,
        policy,
        trace=folder / "trace.jsonl",
        num_blocks=200,
        dtype=options.dtype,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        attention_backend=options.attention,
        async_scheduling=options.scheduling == "async",
        kv_cache_memory_bytes=64 << 20,
        **graph_settings(options.graphs),
    ) as engine:
        assert engine.worker.keyformer.score_mode == options.score_mode
        runner = type(engine.model_runner).__module__
        assert ("gpu.model_runner" in runner) == (options.runner == "V2"), runner
        scheduler = type(engine.scheduler).__name__
        assert ("Async" in scheduler) == (options.scheduling == "async"), scheduler
        captured = counts["capture_end"]
        assert (captured > 0) == (options.graphs != "eager"), counts
        reference = HFReference(model)
        requests = test_masked_reference.serve_mixed_batch(engine, MAX_TOKENS)
        for request in requests:
            test_masked_reference.check(engine, reference, request)
        kv = {"kv_budget": 0.4}
        followed = engine.add(random_prompt(170, 3), max_tokens=MAX_TOKENS, kv=kv)
        engine.run()
        test_kept_sets.check_kept_sets(engine, reference, followed, policy, kv)
        lines = engine.all_trace()
        evicted = sum(line["freed_blocks"] for line in lines)
        assert evicted > 0
        assert arrived["keyformer:compaction_seconds"] > 0, arrived
        replays = counts["replay"]
        assert (replays > 0) == (options.graphs != "eager"), counts
        assert counts["capture_end"] == captured, "a graph was captured while serving"
        if options.graphs in ("FULL", "both"):
            prompts = {line["step"] for line in lines if line["phase"] == "prefill"}
            num_decodes = len({line["step"] for line in lines} - prompts)
            assert replays == num_decodes, (replays, num_decodes)
    return f"{evicted} blocks evicted, {captured} graphs, {replays} replays"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runner", choices=RUNNERS, default="V2")
    parser.add_argument("--graphs", choices=GRAPHS, default="eager")
    parser.add_argument("--scheduling", choices=SCHEDULINGS, default="async")
    parser.add_argument("--attention", choices=ATTENTIONS, default="FLASH_ATTN")
    parser.add_argument("--kernels", default="reference")
    parser.add_argument("--dtype", default="float32")
    # Fused with reference kernels in graphs: an emulation has to capture that operator
    # as one kernel, because it reads its arguments on the host.
    parser.add_argument(
        "--score-mode", choices=("deferred", "fused"), default="deferred"
    )
    options = parser.parse_args()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if options.runner == "V2" else "0"
    with tempfile.TemporaryDirectory() as folder:
        seen = run(options, Path(folder))
    print("RESULT ok", *vars(options).values(), seen, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
