# SPDX-License-Identifier: Apache-2.0
"""How many tokens a request retains, and when it evicts: exact integer arithmetic.

Counts depend on nothing but (prompt tokens, computed tokens, budget, block size), so
the scheduler frees blocks without hearing from the workers and every rank agrees.
Which tokens survive is decided elsewhere, from scores.

    n  tokens computed so far (logical)        k  budget in tokens
    E  evicted blocks = max(0, (n - k) // block_size), never decreasing
    kv_len = n - E * block_size                in [k, k + block_size) once n >= k

    logical slots   [0 ........ E * block_size) [E * block_size ......... n)
                     null blocks, given back     survivors, kv_len of them
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from keyformer_vllm.core.policies import Policy

BudgetBase = Literal["prompt", "sequence"]


@dataclass(frozen=True)
class Eviction:
    """One eviction of one request; the same for all its layers and KV heads.

    Args:
        num_evict: tokens to drop; as many physical slots vanish from the front.
        evicted_blocks: blocks given back so far, this eviction included.
        kv_len_before: physical length before.
        kv_len: physical length after: the number of tokens to retain.
        num_sinks: tokens at positions [0, num_sinks) are retained.
        recent_start: tokens at positions [recent_start, n) are retained.
        budget_tokens: the budget k that led to these counts.
    """

    num_evict: int
    evicted_blocks: int
    kv_len_before: int
    kv_len: int
    num_sinks: int
    recent_start: int
    budget_tokens: int


@dataclass(frozen=True)
class Retention:
    """The resolved retention of one request. Build it with `Retention.resolve`.

    Args:
        policy: gives the window rule and whether sinks are retained.
        num_prompt_tokens: length of the prompt.
        block_size: tokens per block, which is also the eviction interval (1 is the
            paper: exactly k tokens are retained after each step).
        budget: a share of the base in (0, 1), a number of tokens, or None (never
            evict).
        budget_base: what a share is taken of: the `prompt`, or the `sequence`
            computed so far (k then grows with it).
        min_tokens: floor of the budget in tokens.
        recent_ratio: share of the budget that is the recent window, in [0, 1].
        sinks: first tokens to retain, where the budget has room beside the window.
    """

    policy: Policy
    num_prompt_tokens: int
    block_size: int
    budget: Fraction | int | None
    budget_base: BudgetBase
    min_tokens: int
    recent_ratio: Fraction
    sinks: int

    def __post_init__(self) -> None:
        assert self.num_prompt_tokens >= 1, self.num_prompt_tokens
        assert self.block_size >= 1, self.block_size
        assert self.min_tokens >= 0 and self.sinks >= 0, (self.min_tokens, self.sinks)
        assert 0 <= self.recent_ratio <= 1, self.recent_ratio
        assert self.budget_base in ("prompt", "sequence"), self.budget_base
        if isinstance(self.budget, Fraction):
            assert 0 < self.budget < 1, self.budget
        elif self.budget is not None:
            assert self.budget >= 1, self.budget

    @classmethod
    def resolve(
        cls,
        policy: Policy,
        *,
        num_prompt_tokens: int,
        block_size: int,
        budget: float | int,
        min_tokens: int = 0,
        budget_base: BudgetBase = "prompt",
        recent_ratio: float = 0.2,
        sinks: int = 4,
    ) -> "Retention":
        """Convert a user's settings to exact numbers; nothing later sees a float.

        A float means the decimal the user wrote: 0.29 is 29/100 and keeps 29 of 100
        tokens, although the nearest binary number is a little less and
        `int(0.29 * 100)` is 28.

        Args:
            budget: a float in (0, 1], where 1.0 means never evict, or an int >= 1,
                a number of tokens. The type decides: 1 is one token.
            recent_ratio: in [0, 1].
            Others: see the class.
        """
        assert not isinstance(budget, bool), budget
        exact: Fraction | int | None
        if not policy.evicts:
            exact = None
        elif isinstance(budget, int):
            exact = budget
        else:
            exact = Fraction(str(budget))
            assert 0 < exact <= 1, budget
            if exact == 1:
                exact = None
        return cls(
            policy=policy,
            num_prompt_tokens=num_prompt_tokens,
            block_size=block_size,
            budget=exact,
            budget_base=budget_base,
            min_tokens=min_tokens,
            recent_ratio=Fraction(str(recent_ratio)),
            sinks=sinks,
        )

    def budget_tokens(self, num_tokens: int) -> int:
        """Tokens to retain (k) when `num_tokens` are computed; at least 1.

        Without eviction that is all of them. k never grows faster than `num_tokens`.
        """
        if self.budget is None:
            return max(1, num_tokens)
        if isinstance(self.budget, int):
            share = self.budget
        else:
            prompt = self.budget_base == "prompt"
            base = self.num_prompt_tokens if prompt else num_tokens
            share = self.budget.numerator * base // self.budget.denominator
        return max(1, self.min_tokens, share)

    def num_evicted_blocks(self, num_tokens: int) -> int:
        """Blocks given back (E) when `num_tokens` are computed: 0 inside the prompt.

        Never decreases with `num_tokens`, because k grows no faster than it.
        """
        if self.budget is None or num_tokens < self.num_prompt_tokens:
            return 0
        excess = num_tokens - self.budget_tokens(num_tokens)
        return max(0, excess // self.block_size)

    def kv_len(self, num_tokens: int) -> int:
        """Tokens retained once an eviction due at `num_tokens` has happened."""
        return num_tokens - self.num_evicted_blocks(num_tokens) * self.block_size

    def eviction(self, num_tokens: int, evicted_blocks: int) -> Eviction | None:
        """Plan the eviction at the head of a step, or None if none is due.

        Args:
            num_tokens: n, tokens in the cache before the step; at least the prompt.
            evicted_blocks: E of the request so far.
        """
        due = self.num_evicted_blocks(num_tokens)
        assert due >= evicted_blocks >= 0, (due, evicted_blocks)
        if due == evicted_blocks:
            return None
        budget_tokens = self.budget_tokens(num_tokens)
        kv_len = num_tokens - due * self.block_size
        assert 1 <= budget_tokens <= kv_len < budget_tokens + self.block_size
        num_sinks, window = self._sinks_and_window(budget_tokens, kv_len)
        assert num_sinks >= 0 and window >= 0, (num_sinks, window)
        assert num_sinks + window <= kv_len, (num_sinks, window, kv_len)
        recent_start = num_tokens - window
        assert num_sinks < recent_start, (num_sinks, recent_start)
        num_evict = (due - evicted_blocks) * self.block_size
        return Eviction(
            num_evict=num_evict,
            evicted_blocks=due,
            kv_len_before=kv_len + num_evict,
            kv_len=kv_len,
            num_sinks=num_sinks,
            recent_start=recent_start,
            budget_tokens=budget_tokens,
        )

    def never_evicts(self, max_total_tokens: int) -> bool:
        """Whether no eviction can happen up to `max_total_tokens` computed tokens."""
        return self.num_evicted_blocks(max_total_tokens) == 0

    def max_kv_len(self, max_total_tokens: int) -> int:
        """The most tokens held while decoding, the token of the step included.

        A step starts with at most k + block_size - 1 tokens and writes one. The
        prompt phase, which retains everything, is not counted.
        """
        if self.budget is None:
            return max_total_tokens
        budget_tokens = self.budget_tokens(max_total_tokens)
        return min(max_total_tokens, budget_tokens + self.block_size)

    def _sinks_and_window(self, budget_tokens: int, kv_len: int) -> tuple[int, int]:
        sinks = self.sinks if self.policy.uses_sinks else 0
        if self.policy.window is None:
            # All that is retained beyond the sinks is recent, and never nothing.
            num_sinks = min(sinks, budget_tokens - 1)
            return num_sinks, kv_len - num_sinks
        window = self.policy.window(budget_tokens, self.recent_ratio)
        assert window <= budget_tokens, (window, budget_tokens)
        return min(sinks, budget_tokens - window), window
