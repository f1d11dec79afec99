"""Training while another process decodes on the same device: how much each slows the other down.

The decoding process is a stand-in for vLLM (`benchmarks.decode_stand_in`). With MPS, where its daemon can be started,
the trainer's kernels have the lower priority.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import beside_decode
from tests.gpu.figures import FIGURES
from tests.gpu.support import LARGE, NUMERICS, REHEARSAL, build

SECONDS = 2.0 if not REHEARSAL else 0.3
MODES = ("plain", "mps-priority") if not REHEARSAL else ("plain",)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_both_alone_and_beside_each_other(mode: str, bases: Path) -> None:
    model = build(NUMERICS if REHEARSAL else LARGE, bases)
    try:
        found = beside_decode.measure(model, mode, SECONDS)
    except RuntimeError as error:
        if mode == "plain":
            raise
        pytest.skip(f"MPS: {error}")
    for work in beside_decode.WORK:
        alone, beside = (found[f"{work}_{how}"] for how in ("alone", "beside"))
        FIGURES.record(f"{work} on one GPU ({mode}; decoding is a stand-in for vLLM): tokens/s", alone)
        FIGURES.record(f"{work} on one GPU ({mode}; decoding is a stand-in for vLLM): tokens/s", beside, "beside")
        assert min(alone, beside) > 0
