# SPDX-License-Identifier: Apache-2.0
"""Entry point that vLLM calls in every process it starts."""

from __future__ import annotations

import warnings


def register() -> None:
    """Prepare vLLM for a KV policy; inert until one is asked for. Re-entrant.

    Called in the front end, the engine, every worker and every model inspection,
    so it only puts three thin wraps on ``EngineArgs``: everything else follows
    from what ``create_engine_config`` writes into the engine's configuration.
    A vLLM outside the supported range is no reason to stop somebody who asked
    for no policy: it is warned about here and refused there.
    """
    # vLLM imports this module while it looks for plugins: keep that cheap.
    from keyformer_vllm.adapters import compat, engine_args

    problem = compat.version_problem()
    if problem is not None:
        warnings.warn(
            f"{problem}; --kv-policy will be refused", RuntimeWarning, stacklevel=2
        )
    engine_args.install()
