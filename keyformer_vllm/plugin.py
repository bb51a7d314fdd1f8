# SPDX-License-Identifier: Apache-2.0
"""Entry point that vLLM calls in every process it starts."""


def register() -> None:
    """Prepare vLLM for a KV policy; inert until one is asked for. Re-entrant."""
