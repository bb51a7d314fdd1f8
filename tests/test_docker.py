# SPDX-License-Identifier: Apache-2.0
"""The container files: read, and their steps run as they are where a machine allows it.

No Docker engine is needed. Each RUN is one script of `docker/steps`; the wheel is built
and installed by them, from a folder that holds what the Dockerfiles copy and no more.
"""

from __future__ import annotations

import fnmatch
import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from keyformer_vllm import flags

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
PINNED = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+[a-z0-9.-]*")
VLLM_VERSION = "0.32.0"


def instructions(name: str) -> list[tuple[str, str]]:
    """Keyword and arguments of each instruction, continued lines joined."""
    lines = (DOCKER / name).read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = text.replace("\\\n", " ").splitlines()
    return [
        (keyword, " ".join(rest.split()))
        for keyword, _, rest in (line.partition(" ") for line in joined if line)
    ]


def arguments_of(name: str, keyword: str) -> list[str]:
    return [rest for found, rest in instructions(name) if found == keyword]


def copied(name: str) -> list[str]:
    """What a Dockerfile copies from the build context."""
    return [
        source
        for rest in arguments_of(name, "COPY")
        if "--from" not in rest
        for source in rest.split()[:-1]
    ]


def steps_of(name: str) -> list[list[str]]:
    """Script name and arguments of each RUN."""
    steps = []
    for rest in arguments_of(name, "RUN"):
        words = [word for word in shlex.split(rest) if not word.startswith("--")]
        steps.append([Path(words[0]).name, *words[1:]])
    return steps


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return loaded


def run_step(name: str, *arguments: str, root: Path = ROOT, **environment: str):
    """Run a step of a checkout with this interpreter as `python3`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [str(root / "docker" / "steps" / name), *arguments],
        env={**os.environ, "PATH": path, "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


# Dockerfiles


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_are_pinned_and_stages_are_known(name):
    stages: set[str] = set()
    for rest in arguments_of(name, "FROM"):
        image, *alias = rest.split()
        assert image in stages or PINNED.fullmatch(image), image
        if "vllm" in image:
            assert image == f"vllm/vllm-openai:v{VLLM_VERSION}"
        stages.update(alias[1:])
    for origin in re.findall(r"from=(\S+?)(?:,|\s)", (DOCKER / name).read_text()):
        assert origin in stages


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_run_is_one_executable_step(name):
    steps = steps_of(name)
    assert steps
    for script, *arguments in steps:
        assert os.access(DOCKER / "steps" / script, os.X_OK), script
        assert not {"&&", ";", "|"} & set(arguments)
    unused = {path.name for path in (DOCKER / "steps").iterdir()}
    for other in DOCKERFILES:
        unused -= {script for script, *_ in steps_of(other)}
    assert unused == set()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_final_image_serves_as_a_user_and_says_how_it_is(name):
    found = instructions(name)
    final = found[max(i for i, (word, _) in enumerate(found) if word == "FROM") :]
    last = {keyword: rest for keyword, rest in final}
    user, uid = steps_of(name)[-1][1:]
    # By number: what checks that an image is not root's cannot resolve a name.
    assert last["USER"] == uid and int(uid) >= 1000 and user != "root"
    order = [keyword for keyword, _ in final]
    assert order.index("HEALTHCHECK") > len(order) - 1 - order[::-1].index("USER")
    assert "RUN" not in order[len(order) - 1 - order[::-1].index("USER") :]
    assert json.loads(last["ENTRYPOINT"]) == ["vllm", "serve"]
    assert last["EXPOSE"] == "8000"
    assert not any(keyword == "ADD" for keyword, _ in found)
    # Sources and what built them stay in the other stages.
    sources = [rest.split()[:-1] for keyword, rest in final if keyword == "COPY"]
    assert sources in ([], [["docker/steps/"]])


@pytest.mark.parametrize("name", DOCKERFILES)
def test_copied_files_exist_and_reach_the_build(name):
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    for source in copied(name):
        assert (ROOT / source).exists(), source
        assert source.rstrip("/") in allowed, f"{source} is ignored"
    every = {source.rstrip("/") for other in DOCKERFILES for source in copied(other)}
    assert allowed == every, "sent to the engine and copied by nobody"


def test_engine_of_the_image_is_the_one_of_the_tests():
    text = (ROOT / ".ci" / "setup_env.sh").read_text()
    assert f"vllm_version={VLLM_VERSION}\n" in text
    assert ["install_engine.sh"] in steps_of("Dockerfile.cpu")


class _Health(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self):
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("name", DOCKERFILES)
def test_healthcheck_tells_a_healthy_server_from_others(name):
    (rest,) = arguments_of(name, "HEALTHCHECK")
    options, _, command = rest.partition(" CMD ")
    found = dict(re.findall(r"--(\S+)=(\d+)", options))
    assert set(found) == {"interval", "timeout", "start-period", "retries"}
    program, *arguments = json.loads(command)
    assert program == "python3"
    with http.server.HTTPServer(("127.0.0.1", 0), _Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = [a.replace(":8000/", f":{server.server_port}/") for a in arguments]
        assert here != arguments

        def check() -> int:
            command = [sys.executable, *here]
            return subprocess.run(command, stderr=subprocess.DEVNULL).returncode

        assert check() == 0
        _Health.status = 503
        assert check() != 0
        _Health.status = 200
        server.shutdown()
    assert check() != 0, "nobody listens"


# Steps


@pytest.fixture
def recorder(tmp_path):
    """Commands that only write down how they were called, first in the path."""
    log = tmp_path / "calls"
    log.touch()
    folder = tmp_path / "bin"
    folder.mkdir()

    def record(*names):
        for name in names:
            script = folder / name
            script.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n')
            script.chmod(0o755)
        environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        return environment, lambda: log.read_text().splitlines()

    return record


@pytest.mark.parametrize("name", DOCKERFILES)
def test_packages_are_installed_without_leftovers(name, recorder):
    environment, calls = recorder("apt-get", "rm")
    (packages,) = [
        rest for script, *rest in steps_of(name) if script == "install_packages.sh"
    ]
    done = run_step("install_packages.sh", *packages, **environment)
    assert done.returncode == 0, done.stderr
    update, install, clean = calls()
    assert update == "apt-get update"
    wanted = f"apt-get install --yes --no-install-recommends {' '.join(packages)}"
    assert install == wanted
    assert clean.startswith("rm -rf /var/lib/apt/lists/")


def test_engine_is_installed_by_the_stages_of_make(tmp_path):
    for source in ("docker/steps/", ".ci/"):
        assert source in copied("Dockerfile.cpu")
    shutil.copytree(DOCKER / "steps", tmp_path / "docker" / "steps")
    stages = tmp_path / ".ci" / "setup_env.sh"
    stages.parent.mkdir()
    stages.write_text('#!/bin/sh\necho "$* $PYTHON $VENV"\n')
    stages.chmod(0o755)
    done = run_step("install_engine.sh", root=tmp_path, VENV="/opt/venv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{stage} python3.11 /opt/venv" for stage in ("venv", "engine")
    ]
    real = (ROOT / ".ci" / "setup_env.sh").read_text()
    assert "\nvenv) stage_venv ;;\nengine) stage_engine ;;\n" in real


def test_user_owns_its_home_and_has_no_shell(tmp_path, recorder):
    environment, calls = recorder("useradd", "chown")
    home = tmp_path / "home"
    done = run_step("add_user.sh", "keyformer", "10001", HOME=str(home), **environment)
    assert done.returncode == 0, done.stderr
    useradd, chown = calls()
    assert "--uid 10001" in useradd and "--shell /usr/sbin/nologin" in useradd
    assert useradd.endswith(" keyformer") and f"--home-dir {home} " in useradd
    assert chown == f"chown -R keyformer {home}"
    assert (home / ".cache").is_dir()


def test_a_step_that_fails_fails_the_build(recorder, tmp_path):
    environment, _ = recorder("rm")
    broken = Path(environment["PATH"].split(os.pathsep)[0]) / "apt-get"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert run_step("install_packages.sh", "g++", **environment).returncode == 3
    assert run_step("install_wheel.sh", str(tmp_path)).returncode != 0


def test_wheel_is_built_from_what_is_copied_and_installed_alone(tmp_path):
    context = tmp_path / "src"
    for source in copied("Dockerfile"):
        assert source in copied("Dockerfile.cpu")
        at = context / source
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / source, at, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / source, at)
    # Compiling takes a minute and was done before the tests: put the result where
    # setuptools looks for its own, newer than the sources.
    (extension,) = (ROOT / "keyformer_vllm").glob("_C*.so")
    tag = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    built = context / "build" / tag / "keyformer_vllm" / extension.name
    built.parent.mkdir(parents=True)
    shutil.copyfile(extension, built)
    wheels, site = tmp_path / "wheel", tmp_path / "site"
    done = run_step("build_wheel.sh", str(wheels), root=context)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = wheels.iterdir()
    assert fnmatch.fnmatch(wheel.name, "keyformer_vllm-*-cp310-abi3-linux_*.whl")
    done = run_step(
        "install_wheel.sh", str(wheels), PIP_TARGET=str(site), PYTHONPATH=str(site)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in site.iterdir()} - {"bin", "__pycache__"}
    assert {name.split("-")[0] for name in names} == {"keyformer_vllm"}
    assert (site / "keyformer_vllm" / extension.name).is_file()
    assert (site / "keyformer_vllm" / "demo" / "article.txt").is_file()


# compose.yaml


def test_compose_has_the_three_services_with_pinned_images():
    services = compose()["services"]
    assert set(services) == {"server", "prometheus", "grafana"}
    for name in ("prometheus", "grafana"):
        assert PINNED.fullmatch(services[name]["image"])
    build = services["server"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_compose_ports_stay_on_this_machine():
    for name, service in compose()["services"].items():
        for port in service.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), (name, port)


def test_compose_volumes_exist_or_are_declared():
    whole = compose()
    declared, used = set(whole["volumes"]), set()
    for service in whole["services"].values():
        for volume in service["volumes"]:
            source, target, *mode = re.sub(r"\$\{[^}]*\}", "/given", volume).split(":")
            assert target.startswith("/") and mode in ([], ["ro"])
            if source.startswith("."):
                assert (DOCKER / source).exists(), source
                assert mode == ["ro"]
            elif source != "/given":
                used.add(source)
    assert used == declared


def test_compose_waits_for_services_that_say_how_they_are():
    services = compose()["services"]
    duration = re.compile(r"\d+(s|m)")
    for name, service in services.items():
        check = service.get("healthcheck")
        assert (check is None) == (name == "server"), "the image of the server has one"
        if check is not None:
            assert check["test"][0] == "CMD" and len(check["test"]) > 1
            assert duration.fullmatch(check["interval"])
            assert duration.fullmatch(check["timeout"])
        for other, wait in service.get("depends_on", {}).items():
            assert wait["condition"] == "service_healthy"
            assert "healthcheck" in services[other]
        for value in service.get("environment", {}).values():
            assert isinstance(value, str), "YAML would make another type of it"


def test_compose_serves_with_flags_that_exist():
    given = [
        word.partition("=")[0]
        for word in compose()["services"]["server"]["command"]
        if word.startswith("--kv-")
    ]
    assert "--kv-policy" in given
    assert set(given) <= {flag.option for flag in flags.FLAGS}


def test_prometheus_and_grafana_find_what_they_read():
    services = compose()["services"]
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in services and job["metrics_path"] == "/metrics"
    assert services[host]["ports"][0].endswith(f":{port}")
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load(
        (provisioning / "datasources" / "prometheus.yaml").read_text()
    )["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load(
        (provisioning / "dashboards" / "keyformer.yaml").read_text()
    )["providers"]
    mounts = dict(v.split(":")[:2][::-1] for v in services["grafana"]["volumes"])
    assert mounts[provider["options"]["path"]] == "./grafana"
    assert mounts["/etc/grafana/provisioning"] == "./grafana/provisioning"


def test_readme_names_files_and_settings_that_exist():
    text = (DOCKER / "README.md").read_text()
    for path in re.findall(r"-f (\S+)", text):
        assert (ROOT / path).is_file(), path
    variables = set(re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text()))
    assert {name for name in variables if name not in text} == set()
