"""No file of a picture does anything but give pixels, the same ones as in vLLM, or a refusal."""

from __future__ import annotations

import os
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator
from random import Random, SystemRandom

import numpy as np
import pytest

from skyrl.base.pictures.decoding import MAX_PIXELS, opened, size_of
from skyrl.base.pictures.picture import BadPicture
from tests.fuzz.pictures import damaged, files

FILES = 3_000
MOST_CPU_S = 10.0
"""The worker's bound for one picture. Undamaged files of their size take less than a millisecond."""
MOST_GROWTH_MIB = 1500
"""The worker's bound, too."""


def seeds() -> Iterator[int]:
    """The same in every run; with FUZZ_S, random ones follow for a tenth of that time."""
    yield from range(FILES)
    until = time.monotonic() + float(os.environ.get("FUZZ_S", "0")) / 10
    while time.monotonic() < until:
        yield SystemRandom().getrandbits(64)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


@pytest.mark.filterwarnings("ignore")  # Pillow warns of what it forgives
def test_damaged_files_give_pixels_or_a_reason() -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    kinds, ended, before = files(), Counter[str](), peak_mib()
    for seed in seeds():
        rng = Random(seed)
        format, whole = rng.choice(kinds)
        data = damaged(rng, format, whole)
        reason, began = "", time.process_time()
        try:
            picture = opened(data, format)
        except BadPicture as bad:
            picture, reason = None, str(bad)
        assert time.process_time() - began < MOST_CPU_S, seed
        ended["refused" if picture is None else "taken"] += 1
        if picture is None:
            assert re.fullmatch(r"(?!.* at 0x)(is|has|takes) .+", reason), (seed, reason)
            continue
        assert picture.mode == "RGB"
        assert 0 < picture.width * picture.height <= MAX_PIXELS
        if picture.width * picture.height < 10**6:
            theirs = ImageMediaIO().load_bytes(data).media
            assert np.array_equal(np.asarray(picture), np.asarray(theirs)), seed
            assert size_of(data, format) == picture.size
    assert min(ended["taken"], ended["refused"]) > FILES / 10, ended
    assert peak_mib() - before < MOST_GROWTH_MIB
