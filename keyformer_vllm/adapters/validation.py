# SPDX-License-Identifier: Apache-2.0
"""Refuses what a KV policy does not go with, before any engine starts.

A wrong answer is worse than none, so whatever is not known to be right is refused,
one line for each violated rule. Layers are checked once more when the model is
loaded (the attention backend).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keyformer_vllm.adapters import compat
from keyformer_vllm.adapters.gpu_rules import GPU_ARGS_RULES, GPU_OUTCOME_RULES
from keyformer_vllm.adapters.model_rules import MODEL_RULES, OUTCOME_RULES
from keyformer_vllm.adapters.rules import ENGINE_ARGS_RULES, ENVIRONMENT_RULES, Rule
from keyformer_vllm.config import KVPolicyError


def check_environment(policy: str) -> None:
    """Refuse what is told from the installation and the environment alone.

    Raises:
        KVPolicyError: one line for each violated rule.
    """
    problem = compat.version_problem()
    if problem is not None:
        raise KVPolicyError(
            "kv_policy",
            f"--kv-policy {policy} is not available: {problem}; install a vLLM of "
            "that range or drop --kv-policy",
        )
    _refuse(policy, ENVIRONMENT_RULES, None)


def check_engine_args(policy: str, engine_args: Any) -> None:
    """Refuse what is told from vLLM's ``EngineArgs``, before it reads the model.

    Raises:
        KVPolicyError: one line for each violated rule.
    """
    check_environment(policy)
    _refuse(policy, (*ENGINE_ARGS_RULES, *GPU_ARGS_RULES), engine_args)


def check_vllm_config(policy: str, vllm_config: Any) -> None:
    """Refuse what is told from the finished ``VllmConfig``.

    Raises:
        KVPolicyError: one line for each violated rule.
    """
    # What a refused model made of the settings would only be noise.
    _refuse(policy, MODEL_RULES, vllm_config)
    _refuse(policy, (*OUTCOME_RULES, *GPU_OUTCOME_RULES), vllm_config)


def _refuse(policy: str, rules: Sequence[Rule], subject: Any) -> None:
    lines = [
        f"--kv-policy {policy} cannot be combined with {setting}: "
        f"{rule.reason}; {rule.remedy}"
        for rule in rules
        if (setting := rule.find(subject)) is not None
    ]
    if lines:
        raise KVPolicyError("kv_policy", "\n".join(lines))
