# SPDX-License-Identifier: Apache-2.0
"""Without a policy, or with one that never evicts, the engine is stock vLLM.

The stock tokens come from a process in which vLLM loads no plugin at all.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import POLICY
from tests.e2e.stock_driver import describe
from tests.engine import open_engine, random_prompt
from tests.models import SERVABLE

KINDS = [*SERVABLE, "smollm2"]
DTYPES = ["float32", "bfloat16"]
LENGTHS = [1, 31, 100, 257]
MAX_TOKENS = 32

NEVER_EVICTING = [
    {"kv_budget": 1.0},
    {"kv_policy": "full"},
    # The floor: nothing is evicted below it.
    {"kv_budget": 400},
]

STOCK = """
import json, sys
from tests.e2e.test_same_as_stock import DTYPES, tokens_of
tokens = {
    f"{kind}/{dtype}": tokens_of(folder, dtype, None, [None])
    for kind, folder in json.loads(sys.argv[1]).items()
    for dtype in DTYPES
}
loaded = [name for name in sys.modules if name.startswith("keyformer_vllm")]
print("RESULT" + json.dumps([tokens, loaded]))
"""


def prompts() -> list[list[int]]:
    return [random_prompt(length, 2) for length in LENGTHS]


def tokens_of(
    folder: str, dtype: str, policy: dict[str, object] | None, kvs: list
) -> list[list[int]]:
    """Greedy tokens of one batch, its requests with these ``vllm_xargs`` in turn."""
    with open_engine(folder, policy, dtype=dtype, num_blocks=100) as engine:
        requests = [
            engine.add(prompt, max_tokens=MAX_TOKENS, kv=kv)
            for prompt, kv in zip(prompts(), itertools.cycle(kvs), strict=False)
        ]
        engine.run()
        return [request.tokens for request in requests]


@pytest.fixture(scope="module")
def folders(tiny_model, smollm2) -> dict[str, str]:
    return {
        kind: str(smollm2 if kind == "smollm2" else tiny_model(kind)) for kind in KINDS
    }


@pytest.fixture(scope="module")
def stock(folders) -> dict[str, list[list[int]]]:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", STOCK, json.dumps(folders)],
        env={**os.environ, "VLLM_PLUGINS": "", "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT"))
    tokens, loaded = json.loads(line.removeprefix("RESULT"))
    assert loaded == [], "the stock process must not know this package"
    return tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_never_evicts_changes_no_token(folders, stock, kind, dtype):
    """Catches padded pages, another backend, metadata builder or scheduler that
    change a token although nothing is evicted; an opt-out that does not opt out."""
    served = tokens_of(folders[kind], dtype, POLICY, NEVER_EVICTING)
    assert served == stock[f"{kind}/{dtype}"]


@pytest.mark.parametrize(
    "policy",
    [
        None,
        {"policy": "full"},
        {"policy": "keyformer", "budget": 1.0},
        {"policy": "h2o", "min_tokens": 300},
    ],
    ids=str,
)
def test_a_server_that_never_evicts_changes_no_token(folders, stock, policy):
    """As above for the server's own setting, and for no policy with the plugin."""
    tokens = tokens_of(folders["llama-4-2"], "float32", policy, [None])
    assert tokens == stock["llama-4-2/float32"]


def test_an_evicting_policy_does_change_tokens(folders, stock):
    """Catches a comparison that could not tell."""
    tokens = tokens_of(folders["llama-4-2"], "float32", POLICY, [None])
    same = stock["llama-4-2/float32"]
    assert tokens[0] == same[0], "a single token's answer stays below the floor"
    assert all(one != two for one, two in zip(tokens[2:], same[2:], strict=True))


def test_nothing_stays_replaced_after_a_policy(folders):
    """An engine with a policy leaves no part of itself to the next one (A38).

    Catches a backend that is exchanged for good instead of while a model is built.
    """
    folder = Path(folders["llama-4-2"])
    tokens_of(str(folder), "float32", POLICY, [None])
    for policy in (None, {"policy": "full"}):
        with open_engine(folder, policy, num_blocks=100, max_model_len=1024) as engine:
            found = describe(engine)
            assert all(name.startswith("vllm.") for name in found["classes"])
            assert "execute_model" not in vars(engine.model_runner), "a wrapped runner"
