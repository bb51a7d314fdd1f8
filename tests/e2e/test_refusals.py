# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with settings that do not go together: one line, no engine, no wait.

Every rule has its unit test in `tests/adapters/test_validation.py`; here a command
line of each kind goes through vLLM's own front end, three of them in fresh processes.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from tests.refused_models import write_config

pytestmark = pytest.mark.slow

POLICY = ("--kv-policy", "keyformer", "--kv-budget", "0.5")
PREFIX = "keyformer: error: "
EXIT_STATUS = 2
CPU_SECONDS = 60


@dataclass(frozen=True)
class Case:
    """A command line and what its one line must name."""

    name: str
    named: tuple[str, ...]
    words: tuple[str, ...] = POLICY
    model: str = "llama"
    environment: dict[str, str] = field(default_factory=dict)
    version: str = ""


def with_policy(*words):
    return POLICY + words


CASES = [
    Case(
        "microbatches",
        ("--kv-policy keyformer", "--enable-dbo"),
        with_policy("--enable-dbo"),
    ),
    Case(
        "flags before the model's own",
        ("--kv-policy h2o", "--enable-dbo"),
        ("--enable-dbo", "--kv_policy=h2o", "--kv_budget=512"),
    ),
    Case(
        "additional config",
        ("--kv-policy window", "--enable-dbo"),
        ("--additional-config.keyformer.policy=window", "--enable-dbo"),
    ),
    Case(
        "speculative decoding",
        ("--kv-policy keyformer", "--speculative-config"),
        with_policy(
            "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'
        ),
    ),
    Case(
        "KV connector",
        ("--kv-policy keyformer", "--kv-transfer-config"),
        with_policy(
            "--kv-transfer-config",
            '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}',
        ),
    ),
    Case(
        "KV offloading",
        ("--kv-policy keyformer", "--kv-offloading-size"),
        with_policy("--kv-offloading-size", "1"),
    ),
    Case(
        "KV events",
        ("--kv-policy keyformer", "--kv-events-config"),
        with_policy("--kv-events-config", '{"enable_kv_cache_events": true}'),
    ),
    *(
        Case(
            f"cache dtype {name}",
            ("--kv-policy keyformer", f"--kv-cache-dtype {name}"),
            with_policy("--kv-cache-dtype", name),
        )
        for name in ("fp8", "fp8_e4m3", "fp8_e5m2")
    ),
    Case(
        "decode context parallel",
        ("--kv-policy keyformer", "--decode-context-parallel-size 2"),
        with_policy("--decode-context-parallel-size=2", "--tensor-parallel-size=2"),
    ),
    Case(
        "prefill context parallel",
        ("--kv-policy keyformer", "--prefill-context-parallel-size 2"),
        with_policy("--prefill-context-parallel-size", "2"),
    ),
    Case(
        "block size",
        ("--kv-policy keyformer", "--block-size 16"),
        with_policy("--block-size", "16"),
    ),
    Case(
        "several front ends",
        ("--kv-policy keyformer", "--enable-dbo"),
        with_policy("--enable-dbo", "--api-server-count", "2"),
    ),
    Case(
        "no front end",
        ("--kv-policy keyformer", "--pipeline-parallel-size 2"),
        with_policy("--pipeline-parallel-size", "2", "--headless"),
    ),
    Case(
        "scheduler class",
        ("--kv-policy keyformer", "--scheduler-cls a.B"),
        with_policy("--scheduler-cls", "a.B"),
    ),
    Case("MLA", ("--kv-policy", "multi-head latent attention"), model="deepseek-v2"),
    Case("sliding window", ("--kv-policy", "sliding_window"), model="mistral-sliding"),
    Case("mixed windows", ("--kv-policy", "sliding_attention"), model="gemma2"),
    Case("encoder-decoder", ("--kv-policy", "encoder-decoder"), model="whisper"),
    Case("pooling model", ("--kv-policy keyformer", "(pooling)"), model="bert"),
    Case(
        "pooling runner",
        ("--kv-policy keyformer", "(pooling)"),
        with_policy("--runner", "pooling"),
    ),
    Case("hybrid", ("--kv-policy keyformer", "in place of attention"), model="jamba"),
    Case(
        "compact positions",
        ("--kv-positions compact", "--kv-positions original", "no ALiBi"),
        with_policy("--kv-positions", "compact"),
    ),
    Case(
        "unknown positions",
        ("kv_positions='new'", "original, compact"),
        with_policy("--kv-positions", "new"),
    ),
    Case("no policy", ("--kv-budget", "--kv-policy"), ("--kv-budget", "0.5")),
    Case(
        "unknown policy",
        ("kv_policy='snapkv'", "keyformer, h2o"),
        ("--kv-policy", "snapkv"),
    ),
    Case(
        "bad budget",
        ("kv_budget=1.5", "kv_min_tokens"),
        ("--kv-policy", "keyformer", "--kv-budget=1.5"),
    ),
    Case(
        "unknown setting",
        ("'budgett'", "score_queries"),
        ("--additional-config", '{"keyformer": {"policy": "h2o", "budgett": 1}}'),
    ),
    Case(
        "two places",
        ("--kv-policy", "--additional-config keyformer"),
        with_policy("--additional-config", '{"keyformer": {"policy": "h2o"}}'),
    ),
    *(
        Case(
            variable,
            ("--kv-policy keyformer", f"{variable}=1"),
            environment={variable: "1"},
        )
        for variable in (
            "VLLM_USE_RUST_FRONTEND",
            "VLLM_BATCH_INVARIANT",
            "VLLM_USE_V2_MODEL_RUNNER",
        )
    ),
    *(
        Case(
            f"vLLM {version}",
            ("--kv-policy keyformer", f"found vllm {version}", ">=0.32,<0.33"),
            version=version,
        )
        for version in ("0.31.2", "0.33.0")
    ),
]

FRESH = ("microbatches", "sliding window", "VLLM_USE_RUST_FRONTEND")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("refusals")
    return {kind: write_config(kind, root / kind) for kind in {c.model for c in CASES}}


def argv_of(case, models):
    return ["serve", str(models[case.model]), "--port", "0", *case.words]


def check_refusal(case, status, stderr):
    assert status == EXIT_STATUS, stderr
    lines = [line for line in stderr.splitlines() if PREFIX in line]
    assert len(lines) == 1, stderr
    for named in case.named:
        assert named in lines[0]
    assert "Traceback" not in stderr


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    """What every case did, by name: one process imports vLLM and runs them all."""
    cases = [
        {
            "argv": argv_of(case, models),
            "environment": case.environment,
            "version": case.version,
        }
        for case in CASES
    ]
    written = tmp_path_factory.mktemp("results") / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.refusal_driver", str(written)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(written.read_text())
    return {case.name: result for case, result in zip(CASES, found, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_in_one_line(results, case):
    result = results[case.name]
    check_refusal(case, result["status"], result["stderr"])
    assert result["children"] == []


def test_fresh_processes_end_within_the_limit(models, tmp_path):
    """Seconds of CPU are counted, not of the clock: machines are shared."""
    running = []
    for case in CASES:
        if case.name not in FRESH:
            continue
        output = tmp_path / case.name.replace(" ", "-")
        with open(output, "w") as file:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "vllm.entrypoints.cli.main",
                    *argv_of(case, models),
                ],
                env={**os.environ, **case.environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        running.append((case, process, output))
    assert len(running) == len(FRESH)
    for case, process, output in running:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        check_refusal(case, process.returncode, output.read_text())
        assert usage.ru_utime + usage.ru_stime < CPU_SECONDS
