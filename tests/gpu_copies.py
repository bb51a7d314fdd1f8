# SPDX-License-Identifier: Apache-2.0
"""Runs an operator of a GPU implementation on copies of CPU tensors.

So one list of cases, made of CPU tensors, serves every implementation. Whole storages
are copied there and back: views keep their strides and keep sharing memory, and a
write beside the place it belongs to is seen.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


class OnGpu:
    """The functions of `keyformer_vllm.ops.<impl>`, for CPU tensors."""

    def __init__(self, impl: str) -> None:
        self._module = import_module(f"keyformer_vllm.ops.{impl}")

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._module, name)

        def call(*args: Any) -> Any:
            there: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            result = operator(*(_to_gpu(arg, there) for arg in args))
            for here, copy in there.values():
                here.copy_(copy)
            return None if result is None else result.cpu()

        return call


def _to_gpu(arg: Any, there: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    storage = arg.untyped_storage()
    if storage.nbytes() == 0:
        return arg.cuda()
    if storage.data_ptr() not in there:
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        there[storage.data_ptr()] = raw, raw.cuda()
    copy = there[storage.data_ptr()][1].untyped_storage()
    empty = torch.empty(0, dtype=arg.dtype, device="cuda")
    return empty.set_(copy, arg.storage_offset(), arg.size(), arg.stride())
