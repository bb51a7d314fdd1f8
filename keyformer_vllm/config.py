# SPDX-License-Identifier: Apache-2.0
"""Everything a user can set: parsed, checked and refused in one place.

Server settings arrive as ``--kv-*`` flags or as
``additional_config={"keyformer": {...}}``; per-request settings arrive in
``vllm_xargs``. Both end up as a frozen :class:`KeyformerConfig`. Imports neither
torch nor vLLM: it is read before any engine exists.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keyformer_vllm.core.policies import POLICIES, get_policy
from keyformer_vllm.core.retention import BudgetBase, Retention

ADDITIONAL_CONFIG_KEY = "keyformer"
"""The key of ours inside vLLM's ``additional_config``."""

VERSION_KEY = "keyformer_version"
"""Beside it: the version of this package that the front end has."""

REQUEST_PREFIX = "kv_"
"""Per-request keys in ``vllm_xargs`` that start so are ours to accept or refuse."""

VLLM_REQUEST_KEYS = frozenset({"kv_transfer_params", "kv_cache_report_mode"})
"""Keys with that prefix that vLLM itself puts there (``vllm/v1/request.py``)."""

POLICY_NAMES = tuple(POLICIES)
BUDGET_BASES = ("prompt", "sequence")
NOISES = ("gumbel", "none")
SCORE_MODES = ("auto", "deferred", "step", "fused")
KERNELS = ("auto", "cuda", "triton")
ATTENTIONS = ("FLASH_ATTN", "TRITON_ATTN")
SELECTIONS = ("token", "block")
POSITIONS = ("original", "compact")

_MAX_SHOWN = 60
_MAX_TOKENS = 2**31 - 1
_MAX_TAU = 100.0
_MIN_TAU = 0.25


class KVPolicyError(ValueError):
    """A setting the user got wrong: names it, its value and what is allowed.

    ``parameter`` is the setting's name as the user spelled it.
    """

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


@dataclass(frozen=True)
class KeyformerConfig:
    """Settings of one KV policy, checked at construction.

    Args:
        policy: one of ``POLICY_NAMES``; ``full`` never evicts.
        budget: tokens to retain per KV head: a fraction in (0, 1) of the budget
            base, 1.0 (never evict), or an integer number of tokens.
        min_tokens: floor of the budget, in tokens; nothing is evicted below it.
        budget_base: what a fraction is taken of: the ``prompt``, or the
            ``sequence`` computed so far.
        recent_ratio: share of the budget kept as the recent window (paper 3.3).
        sinks: first tokens of the sequence that are always kept.
        tau_init: softmax temperature of the score during the prompt (paper eq. 9).
        tau_end: temperature reached at the request's last token.
        noise: ``gumbel`` (the paper) or ``none``.
        seed: seed of the noise; a request's own seed is mixed in.
        score_queries: which prompt queries score: ``all`` (the paper), ``last:N``, or
            ``stride:S``: every S-th, counted back from the newest.
        score_mode: when queries score: ``deferred`` lets those of decode steps wait
            until their request evicts, ``step`` scores each in its own step, ``fused``
            while it attends, in a kernel of our own. ``auto`` takes ``fused`` where
            that kernel is needed, was measured to be faster or (GPUs) is predicted to
            be, and else ``deferred``.
        kernels: what scores, selects and moves on a GPU: ``auto`` is ``cuda``, the
            compiled extension; ``triton`` for where that cannot be built.
        select: ``token``, or ``block`` for whole runs of 16 positions.
        positions: what attention takes a token's position for: ``original``, or
            ``compact``, its place among the tokens retained; only models with ALiBi.
        audit: evict nothing and attend everything, but tell what would have been
            evicted and what attention it still gets.
        trace: file that receives one JSON line per step and request, or None.
        attention: what attends on a GPU; has no flag of its own, because it is set
            from vLLM's ``--attention-backend``.
        reference_kernels: use the operators in plain PyTorch, for tests; has no flag.
        poison_freed: fill freed blocks with NaN and huge values, to show in tests
            that nobody reads them; has no flag.
        check_ranks: assert in every step that all tensor-parallel ranks hold and
            evict the same numbers of tokens, and that replicas of a KV head keep the
            same ones; slow, for debugging, has no flag.

    Raises:
        KVPolicyError: naming the setting, its value and what is allowed.
    """

    policy: str
    budget: float | int = 0.5
    min_tokens: int = 256
    budget_base: BudgetBase = "prompt"
    recent_ratio: float = 0.2
    sinks: int = 4
    tau_init: float = 1.0
    tau_end: float = 2.0
    noise: str = "gumbel"
    seed: int = 0
    score_queries: str = "all"
    score_mode: str = "auto"
    kernels: str = "auto"
    select: str = "token"
    positions: str = "original"
    audit: bool = False
    trace: str | None = None
    attention: str = "FLASH_ATTN"
    reference_kernels: bool = False
    poison_freed: bool = False
    check_ranks: bool = False

    def __post_init__(self) -> None:
        _check_choice("kv_policy", self.policy, POLICY_NAMES)
        _check_int("kv_min_tokens", self.min_tokens, 1, _MAX_TOKENS)
        _check_budget("kv_budget", self.budget, self.min_tokens)
        _check_choice("kv_budget_base", self.budget_base, BUDGET_BASES)
        _check_float("kv_recent_ratio", self.recent_ratio, 0.0, 1.0)
        _check_int("kv_sinks", self.sinks, 0, _MAX_TOKENS)
        _check_float("kv_tau_init", self.tau_init, _MIN_TAU, _MAX_TAU)
        _check_float("kv_tau_end", self.tau_end, _MIN_TAU, _MAX_TAU)
        if self.tau_end < self.tau_init:
            raise KVPolicyError(
                "kv_tau_end",
                f"kv_tau_end={self.tau_end} is below kv_tau_init={self.tau_init}; "
                "the temperature rises from kv_tau_init to kv_tau_end",
            )
        _check_choice("kv_noise", self.noise, NOISES)
        _check_int("kv_seed", self.seed, 0, 2**63 - 1)
        _parse_score_queries(self.score_queries)
        _check_choice("kv_score_mode", self.score_mode, SCORE_MODES)
        _check_choice("kv_kernels", self.kernels, KERNELS)
        _check_choice("kv_attention", self.attention, ATTENTIONS)
        _check_choice("kv_select", self.select, SELECTIONS)
        _check_choice("kv_positions", self.positions, POSITIONS)
        if self.trace is not None and (
            not isinstance(self.trace, str) or not self.trace
        ):
            raise KVPolicyError(
                "kv_trace", f"kv_trace={shown(self.trace)} must be a file name"
            )
        for name in ("audit", "reference_kernels", "poison_freed", "check_ranks"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise KVPolicyError(
                    f"kv_{name}", f"kv_{name}={shown(value)} must be true or false"
                )

    @property
    def evicts(self) -> bool:
        """Whether this policy can evict anything at all."""
        return self.policy != "full" and not is_full_budget(self.budget)

    @property
    def num_score_queries(self) -> int | None:
        """How many of the last prompt queries score; None for no such limit."""
        kind, number = _parse_score_queries(self.score_queries)
        return number if kind == "last" else None

    @property
    def score_query_stride(self) -> int:
        """Every how many prompt queries one scores; 1 for each of them."""
        kind, number = _parse_score_queries(self.score_queries)
        return number if kind == "stride" else 1

    @property
    def compact_positions(self) -> bool:
        """Whether attention renumbers the tokens that it retains."""
        return self.positions == "compact"

    def score_mode_for(self, has_alibi: bool, layout: str) -> str:
        """The score mode in use: ``auto`` made concrete for a model and a CPU.

        Args:
            has_alibi: whether the model's attention is biased by distance, which only
                our kernel can follow after an eviction.
            layout: packing of the cache (``ops.layout.LAYOUTS``). Where it is made for
                AMX, vLLM's kernel multiplies with tiles and ours does not; elsewhere
                ours is faster, scores included (``benchmarks/README.md``).
        """
        if self.score_mode != "auto":
            return self.score_mode
        if self.audit:  # what it measures comes out of that kernel
            return "fused"
        return "deferred" if layout == "amx" and not has_alibi else "fused"

    def retention(self, num_prompt_tokens: int, block_size: int) -> Retention:
        """How many tokens a prompt of this length retains under these settings.

        Args:
            num_prompt_tokens: prompt length, in tokens.
            block_size: tokens per KV cache block.
        """
        return Retention.resolve(
            get_policy(self.policy),
            budget=self.budget,
            num_prompt_tokens=num_prompt_tokens,
            min_tokens=self.min_tokens,
            budget_base=self.budget_base,
            recent_ratio=self.recent_ratio,
            sinks=self.sinks,
            block_size=block_size,
        )

    def check_trace(self) -> None:
        """Refuse a trace file that cannot be written, before workers try.

        Raises:
            KVPolicyError: naming the file and what the system says about it.
        """
        if self.trace is None:
            return
        try:
            with open(self.trace, "a", encoding="utf-8"):
                pass
        except OSError as error:
            raise KVPolicyError(
                "kv_trace",
                f"kv_trace={shown(self.trace)} cannot be written: {error.strerror}; "
                "name a file in a folder that exists",
            ) from None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> KeyformerConfig:
        """Build from ``additional_config["keyformer"]``.

        Args:
            values: setting name to value, names as in this dataclass.

        Raises:
            KVPolicyError: for an unknown key, a missing policy or a bad value.
        """
        if not isinstance(values, Mapping):
            raise KVPolicyError(
                ADDITIONAL_CONFIG_KEY,
                f"additional_config['keyformer']={shown(values)} must be a "
                "mapping of settings",
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise KVPolicyError(
                    str(name),
                    f"keyformer setting {shown(name)} is unknown; "
                    f"valid ones: {', '.join(known)}",
                )
        if "policy" not in values:
            first = next(iter(values), None)
            raise KVPolicyError(
                "kv_policy",
                (
                    f"{_flag_of(first)} needs --kv-policy"
                    if first is not None
                    else "the keyformer settings need a policy"
                )
                + f"; valid ones: {', '.join(POLICY_NAMES)}",
            )
        config = cls(**values)
        if config.audit:
            _check_audit(config)
        return config

    def to_mapping(self) -> dict[str, Any]:
        """The settings as plain JSON values, accepted by :meth:`from_mapping`."""
        return dataclasses.asdict(self)

    def with_request(self, extra_args: Mapping[str, Any] | None) -> KeyformerConfig:
        """The settings of one request: the server's, with the request's on top.

        Args:
            extra_args: the request's ``vllm_xargs``; keys that do not start with
                ``kv_``, and vLLM's own, belong to somebody else and are ignored.

        Raises:
            KVPolicyError: naming the offending key of ``vllm_xargs``.
        """
        changes: dict[str, Any] = {}
        for key, value in (extra_args or {}).items():
            if not _is_ours(key):
                continue
            if key not in REQUEST_KEYS:
                raise KVPolicyError(
                    key,
                    f"{shown(key)} is not a per-request setting; "
                    f"valid ones: {', '.join(REQUEST_KEYS)}",
                )
            if key == "kv_policy":
                _check_choice(key, value, POLICY_NAMES)
                changes["policy"] = value
            elif key == "kv_report":
                _check_switch(key, value)
            else:
                changes["budget"] = _check_budget(key, value, self.min_tokens)
        return dataclasses.replace(self, **changes) if changes else self


REQUEST_KEYS = ("kv_policy", "kv_budget", "kv_report")


def wants_report(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request asks for a report of what it evicted; checked on arrival."""
    return bool((extra_args or {}).get("kv_report"))


def config_from_additional(additional_config: Any) -> KeyformerConfig | None:
    """The policy inside vLLM's ``additional_config``, or None when there is none."""
    if not isinstance(additional_config, Mapping):
        return None
    values = additional_config.get(ADDITIONAL_CONFIG_KEY)
    return None if values is None else KeyformerConfig.from_mapping(values)


def refuse_request_without_policy(extra_args: Mapping[str, Any] | None) -> None:
    """Refuse ``kv_*`` request settings on a server that was started without a policy.

    Raises:
        KVPolicyError: naming the first such key.
    """
    for key in extra_args or {}:
        if _is_ours(key):
            raise KVPolicyError(
                key,
                f"{shown(key)} needs a server started with a --kv-policy other "
                "than full; this one has none",
            )


def is_full_budget(budget: float | int) -> bool:
    """Whether a budget means "never evict" (the float 1.0, not the integer 1)."""
    return isinstance(budget, float) and budget == 1.0


def parse_budget(text: str) -> float | int:
    """Read a budget from a command line: digits alone are a number of tokens."""
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)


def _is_ours(key: object) -> bool:
    """Whether a key of ``vllm_xargs`` is a per-request setting of a KV policy."""
    return (
        isinstance(key, str)
        and key.startswith(REQUEST_PREFIX)
        and key not in VLLM_REQUEST_KEYS
    )


def _flag_of(setting: str) -> str:
    return "--kv-" + str(setting).replace("_", "-")


def shown(value: Any) -> str:
    """A value as it may stand in an error message: one line, cut, no surprises."""
    try:
        text = json.dumps(value) if not isinstance(value, str) else repr(value)
    except (TypeError, ValueError):
        text = repr(type(value).__name__)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_audit(config: KeyformerConfig) -> None:
    """Refuse a server's settings that leave nothing to audit or break its kernels.

    Not for those of a request: it may opt out of an audit as it may of eviction.
    """
    reasons = {
        "policy": (config.policy == "full", "it evicts nothing that could be audited"),
        "budget": (
            is_full_budget(config.budget),
            "it evicts nothing that could be audited",
        ),
        "score_mode": (
            config.score_mode not in ("auto", "fused"),
            "what is audited is measured where queries attend; use fused or auto",
        ),
        "positions": (
            config.compact_positions,
            "no token leaves, so none is renumbered; use original",
        ),
        "poison_freed": (config.poison_freed, "no block is freed"),
    }
    for name, (violated, reason) in reasons.items():
        if violated:
            raise KVPolicyError(
                f"kv_{name}",
                f"kv_{name}={shown(getattr(config, name))} cannot be combined with "
                f"kv_audit: {reason}",
            )


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise KVPolicyError(
            name, f"{name}={shown(value)} must be one of: {', '.join(allowed)}"
        )


def _check_switch(name: str, value: Any) -> None:
    # vLLM turns the JSON values true and false of `vllm_xargs` into 1 and 0.
    if not isinstance(value, int) or value not in (0, 1):
        raise KVPolicyError(name, f"{name}={shown(value)} must be true or false")


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise KVPolicyError(name, f"{name}={shown(value)} must be an integer")
    if not low <= value <= high:
        raise KVPolicyError(
            name, f"{name}={shown(value)} must be an integer in [{low}, {high}]"
        )


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    # Written so that NaN fails it too.
    if not _is_number(value) or not low <= value <= high:
        raise KVPolicyError(
            name, f"{name}={shown(value)} must be a number in [{low}, {high}]"
        )


def _check_budget(name: str, value: Any, min_tokens: int) -> float | int:
    allowed = (
        "allowed: a fraction in (0, 1), 1.0 to never evict, or a number of tokens "
        f"of at least kv_min_tokens={min_tokens}"
    )
    if not _is_number(value):
        raise KVPolicyError(name, f"{name}={shown(value)} is not a number; {allowed}")
    if isinstance(value, int):
        if not min_tokens <= value <= _MAX_TOKENS:
            raise KVPolicyError(
                name,
                f"{name}={shown(value)} is not a possible number of tokens; {allowed}",
            )
    elif not (math.isfinite(value) and 0.0 < value <= 1.0):
        raise KVPolicyError(name, f"{name}={shown(value)} is not a fraction; {allowed}")
    checked: float | int = value
    return checked


def _parse_score_queries(value: Any) -> tuple[str, int]:
    """``("all", 1)``, ``("last", N)`` or ``("stride", S)``."""
    if value == "all":
        return "all", 1
    found = (
        re.fullmatch(r"(last|stride):(\d{1,9})", value)
        if isinstance(value, str)
        else None
    )
    if found is None or int(found[2]) < 1:
        raise KVPolicyError(
            "kv_score_queries",
            f"kv_score_queries={shown(value)} must be all, last:N or stride:S, with "
            "N or S an integer of at least 1",
        )
    return found[1], int(found[2])
