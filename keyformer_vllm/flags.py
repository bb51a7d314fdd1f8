# SPDX-License-Identifier: Apache-2.0
"""The ``--kv-*`` flags: one for each setting of a policy. Imports no argparse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keyformer_vllm.config import (
    POLICY_NAMES,
    KeyformerConfig,
    KVPolicyError,
    parse_budget,
    shown,
)


@dataclass(frozen=True)
class Flag:
    """One ``--kv-*`` flag: its setting, parser and help text; no parser: a switch."""

    setting: str
    parse: Callable[[str], Any] | None
    metavar: str
    help: str

    @property
    def option(self) -> str:
        """The long option, for example ``--kv-budget``."""
        return "--kv-" + self.setting.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value: it is there or not."""
        return self.parse is None

    @property
    def dest(self) -> str:
        """The argparse destination, for example ``kv_budget``."""
        return "kv_" + self.setting

    def read(self, text: str) -> Any:
        """The setting's value from its spelling on a command line.

        Raises:
            KVPolicyError: when it is not a number where one is needed.
        """
        assert self.parse is not None, self.option
        try:
            return self.parse(text)
        except ValueError:
            kind = "an integer" if self.parse is int else "a number"
            raise KVPolicyError(
                self.option, f"{self.option}={shown(text)} is not {kind}"
            ) from None

    @property
    def default(self) -> Any:
        """The setting's default, or None where it has to be given."""
        default = KeyformerConfig.__dataclass_fields__[self.setting].default
        return None if default is dataclasses.MISSING else default


FLAGS = (
    Flag("policy", str, "POLICY", f"KV policy: {', '.join(POLICY_NAMES)}."),
    Flag(
        "budget",
        parse_budget,
        "BUDGET",
        "Tokens retained per KV head: a fraction of the prompt (0.5), a number of "
        "tokens (2048), or 1.0 to never evict.",
    ),
    Flag(
        "min_tokens", int, "TOKENS", "Floor of the budget; nothing is evicted below it."
    ),
    Flag(
        "budget_base",
        str,
        "BASE",
        "What a fraction is taken of: prompt, or sequence (grows with the answer).",
    ),
    Flag("recent_ratio", float, "RATIO", "Share of the budget kept as recent window."),
    Flag("sinks", int, "TOKENS", "First tokens of the sequence that are always kept."),
    Flag("tau_init", float, "TAU", "Score temperature during the prompt."),
    Flag("tau_end", float, "TAU", "Score temperature at the request's last token."),
    Flag("noise", str, "NOISE", "Noise on the score's logits: gumbel or none."),
    Flag("seed", int, "SEED", "Seed of the noise; a request's own seed is mixed in."),
    Flag(
        "score_queries",
        str,
        "WHICH",
        "Prompt queries that score: all (the paper), last:N, or stride:S (every S-th).",
    ),
    Flag(
        "score_mode",
        str,
        "MODE",
        "When decode queries score: deferred (when their request evicts), step (each "
        "in its own step), fused (while attending), or auto (fused, except on CPUs "
        "with AMX and with Triton kernels).",
    ),
    Flag(
        "kernels",
        str,
        "WHICH",
        "On a GPU: cuda (the compiled extension), triton, or auto (cuda).",
    ),
    Flag(
        "select",
        str,
        "UNIT",
        "What is kept or dropped: token, or block (whole runs of 16 positions).",
    ),
    Flag(
        "positions",
        str,
        "WHICH",
        "Positions that attention sees after an eviction: original, or compact "
        "(renumbered; models with ALiBi only).",
    ),
    Flag(
        "audit",
        None,
        "",
        "Evict nothing; measure what would have been evicted and what it still gets.",
    ),
    Flag("trace", str, "FILE", "Write what was evicted to FILE, one JSON line each."),
)


def settings_from_flags(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Settings from parsed flags.

    Args:
        given: argparse destination to value; None stands for "not given".

    Returns:
        Setting name to value, or None when no ``--kv-*`` flag was given.
    """
    settings = {
        flag.setting: given[flag.dest]
        for flag in FLAGS
        if given.get(flag.dest) is not None
    }
    return settings or None
