#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: .ci/gpu_ops.sh [sanitize | engine]
#
# The operator tests on a real GPU, against the same references as on a CPU. With
# `sanitize`, some of them under compute-sanitizer, once per tool: it makes each take
# many times as long. With `engine`, the tests of whole engines instead. Fails where there is no GPU, because a skip would look like a pass.
# PYTHON names another interpreter than that of .venv.
set -euo pipefail

cd "$(dirname "$0")/.."

python="${PYTHON:-${VENV:-.venv}/bin/python}"
# Small cases that reach every kernel: each head size, both dtypes, all features.
sanitized="cuda and not offsets_beyond and not long_prompt and not wide_block_table"
sanitized+=" and (not match_fp64 or noise-tau-cap-alibi-sinks-places)"

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_ops: torch sees no GPU here" >&2
  exit 1
fi
case "${1:-}" in
  "")
    exec "$python" -m pytest tests/ops -m gpu -p no:xdist -q
    ;;
  engine)
    exec "$python" -m pytest tests/gpu -m gpu -p no:xdist -q
    ;;
  sanitize)
    for tool in memcheck racecheck synccheck; do
      echo "gpu_ops: $tool"
      # torch's own caching allocator would hide what lies behind a tensor.
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" \
        --error-exitcode 1 --target-processes all \
        "$python" -m pytest tests/ops -m gpu -k "$sanitized" -p no:xdist -q
    done
    ;;
  *)
    echo "gpu_ops: unknown argument $1" >&2
    exit 2
    ;;
esac
