# SPDX-License-Identifier: Apache-2.0
"""Keyformer KV-cache eviction for stock vLLM.

Importing this package imports neither torch nor vLLM: plugins are discovered by
every vLLM process, including those that never run a model.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
