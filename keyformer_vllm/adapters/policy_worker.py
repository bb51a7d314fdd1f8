# SPDX-License-Identifier: Apache-2.0
"""What a KV policy adds to a worker of vLLM, whatever the device."""

from __future__ import annotations

from functools import partial
from typing import Any

from keyformer_vllm import ops
from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.kernels import kernels_in_use
from keyformer_vllm.adapters.query_ring import REMEDY, RingShape
from keyformer_vllm.adapters.ranks import check_worker
from keyformer_vllm.adapters.runtime import WorkerRuntime
from keyformer_vllm.adapters.score_mode import score_mode_in_use
from keyformer_vllm.config import (
    KeyformerConfig,
    KVPolicyError,
    config_from_additional,
)


class PolicyWorker:
    """Evicts at the head of a step; a base of our workers."""

    vllm_config: Any
    model_runner: Any
    rank: int

    def init_device(self) -> None:
        check_worker(self.vllm_config, self.rank)
        # Fail before the model is loaded, not at the first eviction.
        ops.require_impl(kernels_in_use(self._kv_config))
        super().init_device()  # type: ignore[misc]

    def determine_available_memory(self) -> int:
        """What is left for KV blocks beside the queries that wait to be scored.

        Raises:
            KVPolicyError: when nothing is.
        """
        available: int = super().determine_available_memory()  # type: ignore[misc]
        if score_mode_in_use(self._kv_config, self.vllm_config) != "deferred":
            return available
        layers = compat.attention_layers(self.vllm_config)
        shape = RingShape.of_layers(self.vllm_config, layers)
        problem = shape.problem(available)
        if problem is not None:
            raise KVPolicyError("kv_score_mode", f"{problem}; {REMEDY}")
        return available - shape.num_bytes

    def _bind(self, backend: Any) -> None:
        """Take hold of the KV cache, once it is there.

        Args:
            backend: the attention backend that every layer must be on.
        """
        self.keyformer = WorkerRuntime(
            self._kv_config,
            self.vllm_config,
            self.model_runner,
            self.rank,
            backend=backend,
            impl=kernels_in_use(self._kv_config),
        )

    def _hook_runner(self) -> None:
        """Let every step pass through the policy."""
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
