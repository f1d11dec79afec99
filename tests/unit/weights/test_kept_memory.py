"""Memory that an update keeps: used again by the next one, and never under a tensor that is still there."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from skyrl.weights.segments import ALIGNMENT, KeptMemory

SHAPES = {"a": (3, 5), "b": (7,), "c": (), "d": (0, 4), "e": (300,)}


def filled(memory: KeptMemory) -> dict[str, torch.Tensor]:
    return {name: memory.empty(shape, torch.float32).fill_(1.0) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_tensors_do_not_share_memory(dtype: torch.dtype) -> None:
    memory = KeptMemory(arena_bytes=1024)
    tensors = [memory.empty(shape, dtype) for shape in SHAPES.values()]
    assert [tuple(one.shape) for one in tensors] == list(SHAPES.values())
    assert {one.dtype for one in tensors} == {dtype}
    spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors if one.numel())
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
    assert all(begin % ALIGNMENT == 0 for begin, _ in spans)


def test_the_next_update_gets_the_same_memory() -> None:
    memory = KeptMemory()
    places = {name: one.data_ptr() for name, one in filled(memory).items()}
    memory.reuse()
    assert {name: one.data_ptr() for name, one in filled(memory).items() if one.numel()} | {"d": 0} == places


def test_another_order_of_the_tensors_takes_no_more_memory() -> None:
    memory, sizes = KeptMemory(arena_bytes=1024), [5000, 300, 300, 300, 300, 300]
    for order in (sizes, sizes[::-1]):
        kept = [memory.empty((size,), torch.uint8) for size in order]
        assert sum(map(len, memory._arenas)) == 5000 + 2 * 1024
        del kept
        memory.reuse()


def test_memory_of_a_tensor_that_is_kept_is_not_used_again() -> None:
    memory = KeptMemory()
    kept = filled(memory)["b"][2:4]
    memory.reuse()
    assert all(float(one.fill_(2.0).sum()) == 2.0 * one.numel() for one in filled(memory).values())
    assert kept.tolist() == [1.0, 1.0]


def test_memory_of_a_tensor_that_was_let_go_late_is_used_again_later() -> None:
    memory = KeptMemory()
    late = filled(memory)
    place = late["a"].data_ptr()
    memory.reuse()
    memory.empty((3, 5), torch.float32)
    late.clear()
    memory.reuse()
    assert place in [memory.empty((2**20,), torch.uint8).data_ptr() for _ in range(512)]
    assert len(memory._arenas) == 2


def test_the_kernel_may_take_the_memory_between_two_updates() -> None:
    memory, before = KeptMemory(arena_bytes=2**22), lazily_free()
    memory.empty((2**22,), torch.uint8).fill_(1)
    memory.reuse()
    assert lazily_free() >= before + 2**21  # the kernel marks pages in batches, and the last ones late


def lazily_free() -> int:
    """Bytes of this process that the kernel may take."""
    with open(f"/proc/{os.getpid()}/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("LazyFree:"))


def test_without_memory_an_error_says_so() -> None:
    failing: Any = KeptMemory(arena_bytes=1 << 62)
    with pytest.raises(OSError, match="memory"):
        failing.empty((1,), torch.float32)
