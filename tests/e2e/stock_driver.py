# SPDX-License-Identifier: Apache-2.0
"""An engine without a policy and what it is made of, in a process of its own.

``python -m tests.e2e.stock_driver MODEL RESULT`` writes the result as JSON. The
environment says whether vLLM loads the plugin.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.engine import Engine, random_prompt

LENGTHS = (33, 97, 200, 320)


def open_stock_engine(model: Path | str) -> Engine:
    return Engine(model, None, num_blocks=100, max_model_len=1024, caching=None)


def describe(engine: Engine) -> dict[str, Any]:
    """Classes at work, bytes per page, and the tokens of fixed prompts."""
    from keyformer_vllm.adapters import compat

    config = engine.llm_engine.vllm_config
    layers = compat.attention_layers(config)
    parts = [
        engine.scheduler,
        engine.manager,
        engine.worker,
        engine.model_runner,
        *compat.metadata_builders(engine.model_runner),
        *(layer.impl for layer in layers.values()),
    ]
    prompts = [random_prompt(length, 21) for length in LENGTHS]
    requests = engine.generate(prompts, max_tokens=40, logprobs=2)
    return {
        "classes": [f"{type(p).__module__}.{type(p).__qualname__}" for p in parts],
        "backends": [layer.get_attn_backend().__name__ for layer in layers.values()],
        "strides": [list(cache.stride()) for cache in engine.model_runner.kv_caches],
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "tokens": [request.tokens for request in requests],
        "logprobs": [[sorted(x.items()) for x in r.logprobs] for r in requests],
    }


def main() -> None:
    model, result = sys.argv[1:]
    engine = open_stock_engine(model)
    from vllm.engine.arg_utils import EngineArgs

    found = describe(engine)
    found["plugin"] = hasattr(EngineArgs.create_engine_config, "_keyformer_wrapped")
    Path(result).write_text(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    main()
