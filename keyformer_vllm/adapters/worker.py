# SPDX-License-Identifier: Apache-2.0
"""CPU worker that evicts at the head of a step; otherwise vLLM's own."""

from __future__ import annotations

from typing import Any

from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.backend import backend_for, cpu_backend_override
from keyformer_vllm.adapters.policy_worker import PolicyWorker


class KeyformerCPUWorker(PolicyWorker, compat.CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker (``vllm/v1/worker/cpu_worker.py``) with a KV policy."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with cpu_backend_override(self._kv_config):
            super().load_model(*args, **kwargs)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self._bind(backend_for(self._kv_config))
        self._hook_runner()
