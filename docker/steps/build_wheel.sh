#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# build_wheel.sh FOLDER: one wheel of this package in FOLDER, built against the torch of
# `python3`; nothing is resolved. setuptools 77 or later must be there: it comes with vLLM.
set -euo pipefail

cd "$(dirname "$0")/../.."
python3 -m pip wheel --disable-pip-version-check --no-input --no-build-isolation \
  --no-deps --wheel-dir "$1" .
