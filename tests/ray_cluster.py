# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of this machine, and what vLLM on CPU lacks to run on it.

vLLM's Ray executor asks its platform for the name of a Ray device, and the CPU
platform has none. Here two logical GPUs of the cluster stand for the two CPUs of two
workers, and the platform is told so in every process. The package knows nothing of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

DEVICE_KEY = "GPU"
"""Ray counts "CPU" otherwise, and finds no ids for resources of other names."""


def supply_device_key() -> None:
    """What every process of a test with Ray's executor does first."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = DEVICE_KEY


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """A small cluster, connected to; yields the module ``ray``."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2,
        num_gpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={
            "env_vars": {"PYTHONPATH": str(ROOT)},
            "worker_process_setup_hook": supply_device_key,
        },
    )
    try:
        yield ray
    finally:
        ray.shutdown()


class EngineActor:
    """An engine inside a Ray actor: one replica of data parallelism.

    Args:
        model: model folder.
        policy: ``additional_config["keyformer"]``.
        trace: its trace file.
        settings: further arguments of :class:`tests.engine.Engine`.
    """

    def __init__(self, model: Path, policy: Any, trace: Path, **settings: Any) -> None:
        from tests.engine import Engine

        self._engine = Engine(model, policy, trace=trace, **settings)

    def generate(
        self, prompts: list[list[int]], max_tokens: int
    ) -> list[tuple[list[int], Any]]:
        """Per prompt: its tokens, and what it kept at each eviction."""
        requests = self._engine.generate(prompts, max_tokens=max_tokens)
        return [(r.tokens, self._engine.kept_sets(r)) for r in requests]

    def close(self) -> int:
        """End the engine; returns the id of its process."""
        self._engine.close()
        return os.getpid()
