# SPDX-License-Identifier: Apache-2.0
"""GPU worker that evicts at the head of a step; otherwise vLLM's own.

Apart from the CPU worker, whose module in vLLM puts stand-ins into ``torch.cuda``.
"""

from __future__ import annotations

from typing import Any

from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.gpu_backend import backend_for, register_backend
from keyformer_vllm.adapters.policy_worker import PolicyWorker


class KeyformerGPUWorker(PolicyWorker, compat.GPUWorker):  # type: ignore[misc]
    """vLLM's GPU worker (``vllm/v1/worker/gpu_worker.py``) with a KV policy."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        register_backend(self._kv_config)
        super().load_model(*args, **kwargs)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        # Before graphs are captured: the query ring is written in them.
        self._bind(backend_for(self._kv_config))

    def compile_or_warm_up_model(self) -> Any:
        # Warming up runs steps that no scheduler made.
        times = super().compile_or_warm_up_model()
        self._hook_runner()
        return times
