#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Linters with the versions pinned in pyproject.toml; `--fix` applies what can be applied.
set -euo pipefail

cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"

mapfile -t native < <(git ls-files --cached --others --exclude-standard -- \
  'csrc/*.h' 'csrc/*.hpp' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh')

if [[ "${1:-}" == --fix ]]; then
  "$bin/ruff" check --fix .
  "$bin/ruff" format .
  ((${#native[@]} == 0)) || "$bin/clang-format" -i "${native[@]}"
  exit 0
fi

status=0
"$bin/ruff" check . || status=1
"$bin/ruff" format --check . || status=1
"$bin/mypy" || status=1
if ((${#native[@]} > 0)); then
  "$bin/clang-format" --dry-run --Werror "${native[@]}" || status=1
else
  echo "clang-format: no file in csrc"
fi
mapfile -t scripts < <(git grep --untracked --files-with-matches '^#!.*bash$')
"$bin/shellcheck" --external-sources "${scripts[@]}" || status=1
"$bin/hadolint" docker/Dockerfile* || status=1
"$bin/check-jsonschema" --builtin-schema vendor.compose-spec docker/compose.yaml || status=1
exit "$status"
