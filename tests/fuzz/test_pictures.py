"""Damaged pictures, as files and in requests."""

from __future__ import annotations

import base64
import json
import os
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from random import Random, SystemRandom
from typing import Any

import numpy as np
import pytest

from skyrl.base.pictures.decoding import MAX_PIXELS, opened, size_of
from skyrl.base.pictures.picture import BadPicture, PictureFormat
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.training import PROTOBUF
from tests.fuzz.pictures import damaged, files
from tests.fuzz.target import Target
from tests.unit.picture_files import png

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


REQUESTS = 200
SAMPLES = count(10**6)
"""Numbers of the samples, which no other test of the sampling session uses."""


def image(format: str, data: bytes) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "format": format}


def sample(target: Target, format: PictureFormat, data: bytes) -> bool:
    """Each returns whether the picture was taken."""
    chunks = [{"type": "encoded_text", "tokens": [5, 6]}, image(format, data)]
    body = {"sampling_session_id": target.ids["sampler"], "seq_id": next(SAMPLES), "prompt": {"chunks": chunks}}
    return target.send("POST", "/api/v1/asample", json=body | {"sampling_params": {"max_tokens": 2}}).is_success


def chat(target: Target, format: PictureFormat, data: bytes) -> bool:
    url = f"data:image/{format};base64,{base64.b64encode(data).decode()}"
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": content}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 2}
    return target.send("POST", "/v1/chat/completions", json=body).is_success


def forward(target: Target, format: PictureFormat, data: bytes) -> bool:
    """Pictures of files that are not damaged take 4 tokens, or the pass fails."""
    chunks = [{"type": "encoded_text", "tokens": [5]}, image(format, data), {"type": "encoded_text", "tokens": [6]}]
    targets = {"data": [0] * 6, "dtype": "int64", "shape": [6]}
    datum = {"model_input": {"chunks": chunks}, "loss_fn_inputs": {"target_tokens": targets}}
    given = json.dumps({"data": [datum], "loss_fn": "cross_entropy"}).encode()
    return _succeeded(target.command("forward", target.numbered(b'"forward_input":' + given)))


def forward_in_protobuf(target: Target, format: PictureFormat, data: bytes) -> bool:
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy", forward_only=True)
    datum = message.data.add()
    datum.model_input.add().image.MergeFrom(pb.ImageChunk(data=data, format=format))
    ended = target.command("forward_backward", target.numbered_proto(message.SerializeToString()), PROTOBUF)
    return _succeeded(ended)


def _succeeded(ended: dict[str, Any] | None) -> bool:
    return ended is not None and "error" not in ended


ROUTES: tuple[Callable[[Target, PictureFormat, bytes], bool], ...] = (sample, chat, forward, forward_in_protobuf)


def test_damaged_pictures_in_requests_get_sound_answers(target: Target) -> None:
    assert forward(target, "png", png(64, 64)), "now the worker that decodes runs"
    kinds, processes, taken, refused = files(), target.pids(), set[Any](), set[Any]()
    for number, seed in enumerate(request_seeds()):
        rng, route = Random(seed), ROUTES[number % len(ROUTES)]
        format, whole = rng.choice(kinds)
        data = damaged(rng, format, whole)
        (taken if route(target, format, data) else refused).add(route)
    assert refused == {*ROUTES}
    assert taken >= {sample, chat}
    assert forward(target, "png", png(64, 64)), "the server still works"
    assert target.pids() == processes, "a process of the server died: perhaps the worker that decodes"


def request_seeds() -> Iterator[int]:
    """The same in every run; with FUZZ_S, random ones follow for a tenth of that time."""
    yield from range(REQUESTS)
    until = time.monotonic() + float(os.environ.get("FUZZ_S", "0")) / 10
    while time.monotonic() < until:
        yield SystemRandom().getrandbits(64)
