# SPDX-License-Identifier: Apache-2.0
"""Our metrics beside vLLM's own, on the same ``/metrics``.

vLLM's entry point for stat loggers (``vllm.stat_logger_plugins``) is not used: any
logger found there turns ``--disable-log-stats`` off, on servers without a policy too,
and ``LLM`` does not look there. Instead our logger joins the others of an engine that
has a policy, in whatever front end holds it. Where statistics are off, it is too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keyformer_vllm.adapters import compat
from keyformer_vllm.config import config_from_additional
from keyformer_vllm.metrics import PrometheusExporter


class KeyformerStatLogger(compat.AggregateStatLoggerBase):  # type: ignore[misc]
    """Exports what the schedulers counted (``vllm/v1/metrics/loggers.py``)."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        name = vllm_config.model_config.served_model_name
        self._exporter = PrometheusExporter(name, engine_indexes)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            counts = compat.take_step_counts(scheduler_stats)
            self._exporter.observe(counts, engine_idx)

    def log_engine_initialized(self) -> None:
        """Nothing: the scheduler's start-up line tells what is on."""


def install() -> None:
    """Wrap how vLLM makes its stat loggers, once however often this is called."""
    manager = compat.StatLoggerManager
    if not hasattr(manager.__init__, compat.WRAPPED):
        manager.__init__ = _wrap_init(manager.__init__)


def _wrap_init(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, vllm_config, *args, **kwargs)
        if config_from_additional(vllm_config.additional_config) is not None:
            # First, so that the others see statistics without our counts in them.
            ours = KeyformerStatLogger(vllm_config, self.engine_indexes)
            self.stat_loggers.insert(0, ours)

    setattr(__init__, compat.WRAPPED, True)
    return __init__
