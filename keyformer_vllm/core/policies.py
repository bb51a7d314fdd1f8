# SPDX-License-Identifier: Apache-2.0
"""The eviction policies: one machinery, different answers to "who stays?".

To add a policy, append one `Policy` to the tuple at the end of this file (and its
name to the documentation). Retention arithmetic, the oracle, the operators and the
adapters read only the fields below; none of them compares names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

WindowRule = Callable[[int, Fraction], int]
"""(budget in tokens, recent ratio) -> number of last tokens always retained."""


@dataclass(frozen=True)
class Policy:
    """What one policy retains, and what it needs to decide that.

    Args:
        name: what users write after `--kv-policy`.
        description: one line for `--help` and the documentation.
        window: size of the recent window; None: whatever is retained beyond the
            sinks is recent, so nothing is ranked.
        uses_sinks: the first tokens of the sequence are always retained.
        scores: tokens are ranked by accumulated scores, so queries must be scored.
        uses_noise: Gumbel noise is added to the logits of a score.
        uses_tau: the temperature of a score follows the schedule, else it is 1.
        random_rank: tokens are ranked by a seeded uniform instead of by score.
        evicts: False for the policy that never evicts.
    """

    name: str
    description: str
    window: WindowRule | None
    uses_sinks: bool = True
    scores: bool = False
    uses_noise: bool = False
    uses_tau: bool = False
    random_rank: bool = False
    evicts: bool = True

    @property
    def needs_noise_key(self) -> bool:
        """Whether a request under this policy must carry a noise key."""
        return self.uses_noise or self.random_rank


def get_policy(name: str) -> Policy:
    """Look a policy up by name.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]


def _share_of_budget(budget_tokens: int, recent_ratio: Fraction) -> int:
    share = recent_ratio.numerator * budget_tokens // recent_ratio.denominator
    return max(1, share)


def _half_of_budget(budget_tokens: int, recent_ratio: Fraction) -> int:
    return max(1, budget_tokens // 2)


def _nothing(budget_tokens: int, recent_ratio: Fraction) -> int:
    return 0


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(
            name="full",
            description="never evict: every token is retained",
            window=None,
            uses_sinks=False,
            evicts=False,
        ),
        Policy(
            name="keyformer",
            description="recent window and the tokens with the highest noisy scores",
            window=_share_of_budget,
            scores=True,
            uses_noise=True,
            uses_tau=True,
        ),
        Policy(
            name="h2o",
            description="recent half and the tokens with the most plain attention",
            window=_half_of_budget,
            scores=True,
        ),
        Policy(
            name="streaming",
            description="the first tokens and the last ones, nothing between",
            window=None,
        ),
        Policy(
            name="window",
            description="the last tokens only",
            window=None,
            uses_sinks=False,
        ),
        Policy(
            name="key-only",
            description="keyformer without a recent window (an ablation of the paper)",
            window=_nothing,
            scores=True,
            uses_noise=True,
            uses_tau=True,
        ),
        Policy(
            name="random",
            description="recent window and a seeded random choice (a control)",
            window=_share_of_budget,
            random_rank=True,
        ),
    )
}
