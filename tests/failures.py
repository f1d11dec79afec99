"""Failures at a chosen point: the k-th operation of torch, or the k-th line of chosen modules, raises.

A test that increases k until nothing fails has tried every point.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType, ModuleType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FailingOperation(TorchDispatchMode):
    """Inside the block, operation number `at` (from 0) that this thread runs in torch raises `error`. Operations
    after it run. Operations that work in place are counted like those that allocate, unless `allocating`."""

    def __init__(self, at: int, error: type[Exception] = torch.OutOfMemoryError, *, allocating: bool = False) -> None:
        super().__init__()
        self._at = at
        self._allocating = allocating
        self._error = error
        self._count = 0

    @property
    def failed(self) -> bool:
        return self._count > self._at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_place_or_view = any(made.alias_info is not None for made in func._schema.returns)
        self._count += not (self._allocating and in_place_or_view)
        if self._count == self._at + 1 and not (self._allocating and in_place_or_view):
            raise self._error(f"out of memory, injected into {func}")
        return func(*args, **(kwargs or {}))


class FailingLine:
    """Inside the block, the `at`-th line (from 0) that this thread runs in `modules` raises MemoryError."""

    def __init__(self, at: int, modules: Sequence[ModuleType]) -> None:
        self._files = {module.__file__ for module in modules}
        self._at = at
        self._count = 0

    @property
    def failed(self) -> bool:
        return self._count > self._at

    def __enter__(self) -> FailingLine:
        self._previous_trace = sys.gettrace()
        sys.settrace(self._trace_call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._previous_trace)

    def _trace_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._trace_line if frame.f_code.co_filename in self._files else None

    def _trace_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._count += 1
            if self._count == self._at + 1:
                raise MemoryError(f"injected at {frame.f_code.co_filename}:{frame.f_lineno}")
        return self._trace_line
