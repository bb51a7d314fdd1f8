# SPDX-License-Identifier: Apache-2.0
"""A disk that fills up while a trace is written."""

from __future__ import annotations

from tests.server import serve

FLAGS = (
    *("--dtype", "float32", "--seed", "0", "--enforce-eager"),
    *("--block-size", "32", "--max-model-len", "512", "--served-model-name", "tiny"),
    *("--num-gpu-blocks-override", "40", "--kv-policy", "keyformer"),
    *("--kv-min-tokens", "16", "--kv-trace", "/dev/full"),
)


def test_a_full_disk_ends_the_trace_and_not_the_server(tiny_model, tmp_path):
    """Writing to /dev/full fails as it does on a full disk; opening it does not."""
    log = tmp_path / "serve.log"
    body = {"model": "tiny", "prompt": [1] * 200, "max_tokens": 60, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    with serve(tiny_model("llama-4-2"), FLAGS, log) as server:
        answers = [server.post("/v1/completions", body).json() for _ in range(2)]
        first, second = (answer["choices"][0]["token_ids"] for answer in answers)
        assert first == second and len(first) == 60
        assert server.metric("keyformer:compactions_total") > 0
        assert server.http.get("/health").status_code == 200
    text = log.read_text(errors="replace").splitlines()
    (line,) = (line for line in text if "kv_trace: /dev/full" in line)
    assert "ERROR" in line
    assert "/dev/full cannot be written: No space left on device" in line
