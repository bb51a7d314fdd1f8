#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Compiles every csrc/cuda/*.cu to an object file. It links and runs nothing, so it
# needs nvcc but no GPU; it finds what breaks a build, not what breaks a kernel.
set -euo pipefail

cd "$(dirname "$0")/.."

shopt -s nullglob globstar
sources=(csrc/cuda/**/*.cu)
if ((${#sources[@]} == 0)); then
  echo "cuda: nothing to compile, csrc/cuda has no .cu file"
  exit 0
fi
if ! command -v nvcc >/dev/null; then
  echo "cuda: SKIPPED ${#sources[@]} file(s), nvcc is not installed"
  exit 0
fi

out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
arch="${CUDA_ARCH:-90}"
mapfile -t includes < <("${VENV:-.venv}/bin/python" -c '
from torch.utils.cpp_extension import include_paths
print("\n".join(f"-I{path}" for path in include_paths("cuda")))')
for source in "${sources[@]}"; do
  echo "cuda: nvcc -arch=sm_$arch $source"
  nvcc -std=c++17 -O2 -arch="sm_$arch" -Icsrc "${includes[@]}" \
    -c "$source" -o "$out/object.o"
done
