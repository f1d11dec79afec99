"""New weights in a GPU's memory, opened by another process as a server opens them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from skyrl.weights.segments import Segment, places_of
from tests.gpu.support import REHEARSAL

OPENS = """
import json, sys, torch
from skyrl.weights.segments import opened
described, places = json.loads(sys.stdin.read())
found = opened(described)
print(json.dumps([float(found[begin : begin + 4096].view(torch.float32).sum()) for begin in places]))
"""


@pytest.mark.skipif(REHEARSAL, reason="needs a CUDA device: without one segments lie in main memory")
def test_another_process_finds_the_tensors_of_a_segment_on_the_gpu() -> None:
    device = torch.device("cuda", 0)
    tensors = {name: torch.full((1024,), value, device=device) for name, value in (("a", 1.0), ("b", 2.0))}
    places, size = places_of(tensors)
    segment = Segment(size, device)
    segment.fill(tensors, places)
    asked = json.dumps([segment.described(), places])
    done = subprocess.run(
        [sys.executable, "-c", OPENS], input=asked, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1024.0, 2048.0]
    segment.close()
