# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm` command lines one after the other in one process.

Importing vLLM takes most of a start that is refused, so `test_refusals.py` pays for
it once here. Reads cases as JSON from stdin; writes what each did to the file named
on the command line.
"""

import contextlib
import io
import json
import os
import sys
import traceback
from unittest import mock

import psutil
import vllm.model_executor.models.registry as model_registry
from vllm.entrypoints.cli.main import main

from keyformer_vllm.adapters import compat


def run(case):
    """Run one command line; return its status, its stderr and what it left running."""
    stderr = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["vllm", *case["argv"]]))
        stack.enter_context(mock.patch.dict(os.environ, case["environment"]))
        if case["version"]:
            stack.enter_context(
                mock.patch.object(compat, "vllm_version", lambda: case["version"])
            )
        stack.enter_context(contextlib.redirect_stderr(stderr))
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
            status = "exception"
    children = [child.name() for child in psutil.Process().children(recursive=True)]
    return {"status": status, "stderr": stderr.getvalue(), "children": children}


if __name__ == "__main__":
    # vLLM looks at each new architecture in a process of its own: 15 s apiece.
    model_registry._run_in_subprocess = lambda inspect: inspect()
    results = [run(case) for case in json.load(sys.stdin)]
    with open(sys.argv[1], "w") as file:
        json.dump(results, file)
