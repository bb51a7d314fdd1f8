# SPDX-License-Identifier: Apache-2.0
"""What an audit measures: the attention that tokens still get which would be gone.

An audited request holds all its tokens. A virtual eviction exchanges them, so that
those that would be gone lie in its leading blocks, the front. Attention reads all of
them and notes, per row and query head, what the front contributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

RISK_TOLERANCE = 2.5
"""Steps whose tolerance is below it are at risk: so many as were found to change under
teacher forcing (``benchmarks/README.md``, Quality)."""


@dataclass(frozen=True)
class AuditedStep:
    """What the front of a request did in one of its steps.

    Args:
        mass_lost: its share of the step's attention, mean of all layers and heads.
        tolerance: margin of the first token's logit over the second's, divided by the
            relative change of attention's output without the front: the smaller, the
            likelier another token would have come first.
    """

    mass_lost: float
    tolerance: float

    @property
    def at_risk(self) -> bool:
        """Whether another token would likely have come first."""
        return self.tolerance < RISK_TOLERANCE


class StepAudit:
    """Collects a step's measurements from all layers; lives as long as the worker.

    Args:
        num_layers: attention layers of the model.
        num_rows: the most requests of a step.
        num_heads: query heads of a layer.
        device: where the cache is.
    """

    def __init__(
        self, num_layers: int, num_rows: int, num_heads: int, device: torch.device
    ) -> None:
        self._measured = torch.zeros(num_layers, num_rows, num_heads, 3, device=device)
        self.forget()

    def layer(self, index: int) -> torch.Tensor:
        """Where a layer leaves its part: float32 ``[num_rows, num_heads, 3]``."""
        return self._measured[index]

    def forget(self) -> None:
        """Drop a step that was planned and not read, such as one that failed."""
        self._request_ids: list[str] = []

    def plan(
        self,
        request_ids: Sequence[str],
        own: np.ndarray[Any, Any],
        front_blocks: np.ndarray[Any, Any],
    ) -> None:
        """Say which rows of the step will be read.

        Args:
            request_ids: of the batch, in row order.
            own: int64, rows of the batch that our kernel attends, in its order.
            front_blocks: ``[num_reqs]``, blocks of each request's front.
        """
        measured = np.flatnonzero(front_blocks[own])
        self._request_ids = [request_ids[row] for row in own[measured]]
        self._measured_rows = torch.from_numpy(measured)
        self._logits_rows = torch.from_numpy(own[measured])

    def take(self, logits: torch.Tensor | None) -> dict[str, AuditedStep]:
        """What was measured in the step, by request id; forgets it.

        Args:
            logits: ``[num_reqs, vocab_size]``, before sampling; not mutated.
        """
        request_ids = self._request_ids
        if not request_ids:
            return {}
        self.forget()
        assert logits is not None, "a step that attended has no logits"
        mass, change, norm = self._measured[:, self._measured_rows].unbind(-1)
        # [layers, rows]; the heads of a layer share its output projection.
        relative = change.sum(-1) / norm.sum(-1)
        first, second = logits[self._logits_rows].float().topk(2).values.unbind(-1)
        tolerance = (first - second) / relative.mean(0).sqrt()
        lost = mass.mean((0, 2))
        return {
            request_id: AuditedStep(*values)
            for request_id, *values in zip(
                request_ids, lost.tolist(), tolerance.tolist(), strict=True
            )
        }
