#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# install_wheel.sh FOLDER: installs the wheel in FOLDER and nothing else, then checks
# that the operators load and that vLLM will find the plugin.
set -euo pipefail

python3 -m pip install --disable-pip-version-check --no-input --no-cache-dir \
  --no-index --no-deps "$1"/keyformer_vllm-*.whl
# Away from a checkout: what was installed must be what is imported.
cd /
python3 - <<'PY'
from importlib.metadata import entry_points

from keyformer_vllm import ops  # noqa: F401 - loads the extension

(plugin,) = entry_points(group="vllm.general_plugins", name="keyformer")
plugin.load()
PY
