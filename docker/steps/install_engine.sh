#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The CPU engine in a virtual environment ($VENV), by the stages that `make` runs.
set -euo pipefail

cd "$(dirname "$0")/../.."
export PYTHON="${PYTHON:-python3.11}"
export PIP_NO_CACHE_DIR=1
.ci/setup_env.sh venv
.ci/setup_env.sh engine
