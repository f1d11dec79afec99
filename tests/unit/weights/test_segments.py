"""Memory for the tensors of an update: segments between two processes, and arenas that the next update takes."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl.weights.segments import ALIGNMENT, NAME, KeptMemory, Segment, SegmentError, opened, places_of

CPU = torch.device("cpu")
TRAINER = """
import json, sys, time, torch
from skyrl.weights.segments import Segment
segment = Segment(4 * 2**20, torch.device("cpu"))
segment.fill({"a": torch.arange(2**20, dtype=torch.float32)}, [0])
print(json.dumps(segment.described()), flush=True)
time.sleep(60)
"""


@pytest.fixture
def trainer() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, json.loads(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def test_what_a_killed_trainer_has_sent_stays_whole_and_then_its_memory_is_free(
    trainer: tuple[subprocess.Popen[str], dict[str, Any]],
) -> None:
    process, described = trainer
    segment = opened(described)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert torch.equal(segment.view(torch.float32), torch.arange(2**20, dtype=torch.float32))
    assert mappings() == 1
    del segment
    assert mappings() == 0
    assert not any(NAME in path.name for path in Path("/dev/shm").iterdir())
    with pytest.raises(SegmentError, match="one machine, one user"):
        opened(described)


def mappings() -> int:
    """Of segments, in this process."""
    return Path("/proc/self/maps").read_text().count(f"/memfd:{NAME}")


def test_tensors_of_every_kind_arrive_bit_for_bit() -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        "b": torch.tensor(2.5, dtype=torch.float64),
        "c": torch.empty(0, 3),
        "d": torch.tensor([True, False]),
        "e": torch.tensor([0.5]).to(torch.float8_e4m3fn),
    }
    places, size = places_of(tensors)
    segment = Segment(size, CPU)
    segment.fill(tensors, places)
    found = opened(segment.described())
    for (_, tensor), begin in zip(tensors.items(), places, strict=True):
        arrived = found[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        assert torch.equal(arrived.float(), tensor.float())
    segment.close()


def test_a_receiver_cannot_change_the_memory_of_the_trainer() -> None:
    segment = Segment(mmap.PAGESIZE, CPU)
    opened(segment.described()).fill_(7)
    assert int(opened(segment.described()).sum()) == 0
    segment.close()


def test_a_segment_cannot_shrink_under_a_reader() -> None:
    segment = Segment(mmap.PAGESIZE, CPU)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.described()["descriptor"], 0)
    segment.close()


@pytest.mark.parametrize("change", ["inode", "bytes", "descriptor", "pid"])
def test_nothing_but_the_described_segment_is_opened(change: str) -> None:
    segment = Segment(mmap.PAGESIZE, CPU)
    with pytest.raises(SegmentError):
        opened(segment.described() | {change: 0})
    segment.close()


def test_a_file_or_a_segment_that_may_shrink_is_refused(tmp_path: Path) -> None:
    descriptor = os.memfd_create(NAME)
    os.ftruncate(descriptor, 64)
    described = {"pid": os.getpid(), "descriptor": descriptor, "inode": os.fstat(descriptor).st_ino, "bytes": 64}
    with pytest.raises(SegmentError, match="shrink"):
        opened(described)
    os.close(descriptor)
    read, write = os.pipe()  # to open a pipe would wait for its other end
    with pytest.raises(SegmentError, match="pipe"):
        opened(described | {"descriptor": read})
    os.close(read)
    os.close(write)


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
