# SPDX-License-Identifier: Apache-2.0
"""The registry: complete, consistent, and enough to describe a policy."""

import pickle
from fractions import Fraction

import pytest

from keyformer_vllm.core.policies import POLICIES, get_policy


def test_names():
    assert list(POLICIES) == [
        "full",
        "keyformer",
        "h2o",
        "streaming",
        "window",
        "key-only",
        "random",
    ]
    assert all(get_policy(name).name == name for name in POLICIES)


def test_unknown_policy_names_the_known_ones():
    with pytest.raises(ValueError, match="'snapkv'.*full, keyformer, h2o"):
        get_policy("snapkv")


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_fields_agree(policy):
    assert policy.description and "\n" not in policy.description
    ranked = policy.window is not None
    assert ranked == (policy.scores or policy.random_rank)
    assert not (policy.scores and policy.random_rank)
    if policy.uses_noise or policy.uses_tau:
        assert policy.scores
    assert policy.needs_noise_key == (policy.uses_noise or policy.random_rank)
    # Policies cross process borders in the plans of a step.
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize("budget", [1, 2, 3, 10, 257])
@pytest.mark.parametrize("ratio", ["0", "0.2", "0.3", "1"])
def test_window_fits_the_budget(budget, ratio):
    for policy in POLICIES.values():
        if policy.window is not None:
            window = policy.window(budget, Fraction(ratio))
            assert 0 <= window <= budget
            assert window >= 1 or policy.name == "key-only"


def test_window_sizes():
    ratio = Fraction("0.29")
    assert get_policy("keyformer").window(100, ratio) == 29
    assert get_policy("random").window(100, ratio) == 29
    assert get_policy("h2o").window(101, ratio) == 50
    assert get_policy("key-only").window(100, ratio) == 0
