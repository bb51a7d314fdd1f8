# SPDX-License-Identifier: Apache-2.0
"""What an audit makes of its layers' measurements, by hand on two layers."""

import math

import numpy as np
import pytest
import torch

from keyformer_vllm.adapters.audit import RISK_TOLERANCE, AuditedStep, StepAudit

LOGITS = torch.tensor([[9.0, 1.0, 8.0], [0.0, 0.0, 0.0], [5.0, 4.0, 1.0]])


@pytest.fixture
def audit():
    """Rows 0 and 2 of a batch are attended by our kernel; row 1 is another's."""
    audit = StepAudit(num_layers=2, num_rows=4, num_heads=2, device=torch.device("cpu"))
    # [row of the kernel, head]: share lost, squared change, squared norm.
    audit.layer(0)[:2] = torch.tensor(
        [[[0.1, 1.0, 2.0], [0.3, 0.0, 2.0]], [[0.2, 0.5, 4.0], [0.2, 0.5, 4.0]]]
    )
    audit.layer(1)[:2] = torch.tensor(
        [[[0.0, 0.0, 9.0], [0.0, 0.0, 1.0]], [[0.6, 2.0, 3.0], [0.0, 0.0, 1.0]]]
    )
    return audit


def plan(audit, front_blocks):
    audit.plan(["a", "b", "c"], np.array([0, 2]), np.array(front_blocks, np.int32))


def test_a_step_is_the_mean_of_layers_and_heads(audit):
    plan(audit, [1, 3, 2])
    found = audit.take(LOGITS)
    assert list(found) == ["a", "c"]
    assert found["a"].mass_lost == pytest.approx(0.1)
    assert found["c"].mass_lost == pytest.approx(0.25)
    # Layers change by (1/4, 0) and (1/8, 1/2) of the squared norm.
    assert found["a"].tolerance == pytest.approx((9 - 8) / math.sqrt(1 / 8))
    assert found["c"].tolerance == pytest.approx((5 - 4) / math.sqrt(5 / 16))
    assert [step.at_risk for step in found.values()] == [False, True]


def test_requests_without_a_front_and_steps_already_read_are_left_out(audit):
    plan(audit, [0, 3, 2])
    found = audit.take(LOGITS)
    assert list(found) == ["c"] and found["c"].mass_lost == pytest.approx(0.25)
    assert audit.take(LOGITS) == {}
    plan(audit, [1, 0, 1])
    audit.forget()
    assert audit.take(None) == {}


def test_a_front_that_changes_nothing_is_no_risk(audit):
    audit.layer(0)[0, :, 1] = 0.0
    plan(audit, [1, 0, 0])
    (step,) = audit.take(LOGITS).values()
    assert step.tolerance == math.inf and not step.at_risk


@pytest.mark.parametrize(("factor", "expected"), [(0.99, True), (1.0, False)])
def test_at_risk_is_below_the_calibrated_tolerance(factor, expected):
    assert AuditedStep(0.1, factor * RISK_TOLERANCE).at_risk is expected
