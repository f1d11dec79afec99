"""Memory that two processes share for new weights."""

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

from skyrl.weights.segments import NAME, Segment, SegmentError, opened, places_of

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
