#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Compiles every csrc/cuda/*.cu for the oldest and the main architecture and prints what
# the assembler says of registers and spills; checks the bindings against torch's
# headers. It links and runs nothing, so it needs nvcc but neither a GPU nor a CUDA
# torch; it finds what breaks a build, not what breaks a kernel.
set -euo pipefail

cd "$(dirname "$0")/.."

if ! command -v nvcc >/dev/null; then
  echo "cuda: SKIPPED, nvcc is not installed"
  exit 0
fi

out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
python="${VENV:-.venv}/bin/python"

compile() {
  local arch="$1" source="$2" log status=0
  log="$out/$arch-$(basename "$source").log"
  nvcc -std=c++17 -O3 -arch="sm_$arch" -Xptxas -v -Icsrc -Icsrc/cuda \
    -c "$source" -o "${log%.log}.o" >"$log" 2>&1 || status=$?
  # One write, so that the lines of files compiled side by side stay together.
  printf 'cuda: sm_%s %s\n%s\n' "$arch" "$source" "$(<"$log")"
  return "$status"
}
export -f compile
export out

shopt -s extglob
# The files of one dtype take longest: first, the two dtypes side by side.
for arch in ${CUDA_ARCHS:-90a 80}; do
  for source in csrc/cuda/*_[bf][fp]16.cu csrc/cuda/!(*16).cu; do
    printf '%s\0%s\0' "$arch" "$source"
  done
done | xargs -0 -n 2 -P 2 bash -c 'compile "$@"' _

mapfile -t includes < <("$python" -c '
import sysconfig
from torch.utils.cpp_extension import include_paths
for path in [*include_paths(), sysconfig.get_paths()["include"]]:
    print(f"-isystem{path}")')
echo "cuda: the bindings, csrc/cuda/torch_bindings.cpp"
"${CXX:-g++}" -std=c++17 -fsyntax-only -Wall -Wextra -Werror -DUSE_CUDA \
  -DTORCH_TARGET_VERSION=0x020A000000000000 -Icsrc "${includes[@]}" \
  csrc/cuda/torch_bindings.cpp
echo "cuda: ok"
