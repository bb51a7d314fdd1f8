#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that wants measuring on a GPU, in one go: gpu_run.py in the environment of
# an offline vLLM. See --help. PYTHON names the interpreter (default: python3).
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHON="${PYTHON:-python3}"

if [[ "${1:-}" == --vllm-env ]]; then
  file="${2:-}"
  if [[ ! -f "$file" ]]; then
    printf 'error: --vllm-env %s: no such file\n' "$file" >&2
    exit 2
  fi
  set +u # not written for it
  # shellcheck source=/dev/null
  . "$file"
  set -u
  shift 2
fi
exec "$PYTHON" "$here/gpu_run.py" "$@"
