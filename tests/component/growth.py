"""Measures work and memory without a clock: lines that run, and bytes that objects hold."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np

import skyrl

SKYRL = Path(skyrl.__file__).parent


@contextmanager
def lines_run(*packages: str) -> Iterator[Counter[str]]:
    """How many lines run in this thread meanwhile, by function. Counts the code of these packages of skyrl, such as
    chat/agents. A loop runs its lines anew in each round."""
    counts: Counter[str] = Counter()
    directories = tuple(f"{SKYRL / package}/" for package in packages)

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            counts[frame.f_code.co_qualname] += 1
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(directories) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield counts
    finally:
        sys.settrace(before)


def bytes_held(objects: Iterable[object]) -> int:
    """The bytes of all objects that are reached from these, each once; of an array's view, those of its whole array."""
    seen: set[int] = set()
    todo = list(objects)
    held = 0
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(each))
        held += sys.getsizeof(each)
        todo += gc.get_referents(each)
        if isinstance(each, np.ndarray) and each.base is not None:
            todo.append(each.base)
    return held
