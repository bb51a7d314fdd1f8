# SPDX-License-Identifier: Apache-2.0
"""CPU worker that evicts at the head of a step; otherwise vLLM's own."""

from __future__ import annotations

from functools import partial
from typing import Any

from keyformer_vllm import ops
from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.backend import backend_for, cpu_backend_override
from keyformer_vllm.adapters.query_ring import REMEDY, RingShape
from keyformer_vllm.adapters.ranks import check_worker
from keyformer_vllm.adapters.runtime import WorkerRuntime
from keyformer_vllm.adapters.score_mode import score_mode_in_use
from keyformer_vllm.config import (
    KeyformerConfig,
    KVPolicyError,
    config_from_additional,
)


class KeyformerCPUWorker(compat.CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker (``vllm/v1/worker/cpu_worker.py``) with a KV policy."""

    def init_device(self) -> None:
        check_worker(self.vllm_config, self.rank)
        # Fail before the model is loaded, not at the first eviction.
        ops.require_impl("cpu")
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with cpu_backend_override(self._kv_config):
            super().load_model(*args, **kwargs)

    def determine_available_memory(self) -> int:
        """What is left for KV blocks beside the queries that wait to be scored.

        Raises:
            KVPolicyError: when nothing is.
        """
        available: int = super().determine_available_memory()
        if score_mode_in_use(self._kv_config, self.vllm_config) != "deferred":
            return available
        layers = compat.attention_layers(self.vllm_config)
        shape = RingShape.of_layers(self.vllm_config, layers)
        problem = shape.problem(available)
        if problem is not None:
            raise KVPolicyError("kv_score_mode", f"{problem}; {REMEDY}")
        return available - shape.num_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self.keyformer = WorkerRuntime(
            self._kv_config,
            self.vllm_config,
            self.model_runner,
            self.rank,
            backend=backend_for(self._kv_config),
            impl="cpu",
        )
        # The legacy Ray executor calls the runner, not the worker; so the hooks
        # sit on the runner's methods.
        runner = self.model_runner
        runner.execute_model = partial(
            self.keyformer.execute_model, runner.execute_model
        )
        runner.sample_tokens = partial(
            self.keyformer.sample_tokens, runner.sample_tokens
        )

    @property
    def _kv_config(self) -> KeyformerConfig:
        config = config_from_additional(self.vllm_config.additional_config)
        assert config is not None, "this worker is only used with a KV policy"
        return config
