# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with the plugin installed and no policy: settings of one are refused."""

from __future__ import annotations

import pytest

from tests.engine import random_prompt
from tests.server import serve


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    flags = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")
    flags += ("--num-gpu-blocks-override", "100", "--served-model-name", "tiny")
    log = tmp_path_factory.mktemp("stock") / "serve.log"
    with serve(tiny_model("llama-4-2"), flags, log) as running:
        yield running


BODIES = {
    "/v1/completions": {"prompt": random_prompt(50, 1)},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "xargs",
    [
        {"kv_policy": "keyformer"},
        {"kv_policy": "full"},
        {"kv_budget": 0.5},
        {"kv_report": True},
    ],
)
def test_a_policy_asked_of_a_server_that_has_none(server, path, xargs):
    (key,) = xargs
    body = {"model": "tiny", "max_tokens": 4, **BODIES[path]}
    refused = server.post(path, body | {"vllm_xargs": xargs})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == f"vllm_xargs.{key}"
    assert "needs a server started with a --kv-policy" in error["message"]
    # What is not ours passes, as on a server without the plugin.
    served = server.post(path, body | {"vllm_xargs": {"other": 1}})
    assert served.status_code == 200, served.text
    assert served.json()["usage"]["completion_tokens"] > 0


def test_nothing_of_ours_is_at_work(server):
    text = server.log.read_text(errors="replace")
    assert "KV policy" not in text
    assert "--kv-policy" not in text
    exported = server.http.get("/metrics").text
    assert "vllm:num_requests_running" in exported
    assert "keyformer" not in exported
