"""Samples on prompts with pictures: `python -m benchmarks.picture_load URL PICTURES IN_FLIGHT`.

Draws PICTURES different JPEG files of 4 megapixels, says `ready`, waits for a line on standard input, and sends one
sample for each, IN_FLIGHT at a time. Prints JSON: how long all took, how many failed, and the bytes of a file. It is a
process of its own, so that drawing and encoding take no time from the samples that are measured beside them.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Self

import aiohttp
import numpy as np
from PIL import Image

MODEL = "tiny-vision"
SIDE = 2000
"""Pixels of each side of a picture."""
GRAIN = 8
VISION_START, VISION_END = 512, 513
TEXT = list(range(300, 316))
DEADLINE_S = 240.0


class Tenant:
    """A sampling session with a key of its own, in `async with`."""

    def __init__(self, url: str, key: str, model: str = MODEL) -> None:
        self._url, self._key, self._model = url, key, model
        self._number = 0

    async def __aenter__(self) -> Self:
        headers, connector = {"X-API-Key": self._key}, aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(f"{self._url}/api/v1/", headers=headers, connector=connector)
        session = {"type": "create_session", "sdk_version": "0.38.0", "tags": [], "user_metadata": {}}
        session_id = (await self._post("create_session", session))["session_id"]
        sampler = {"type": "create_sampling_session", "session_id": session_id, "sampling_session_seq_id": 0}
        found = await self._post("create_sampling_session", sampler | {"base_model": self._model})
        self._sampler: str = found["sampling_session_id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def sample(
        self, chunks: list[dict[str, Any]], max_tokens: int, stop: Sequence[int] = (), seed: int | None = None
    ) -> None:
        """One sample, until its result is there. Raises RuntimeError with the server's answer if it fails."""
        params = {"max_tokens": max_tokens, "temperature": 1.0, "stop": list(stop), "seed": seed}
        body = {"type": "sample", "sampling_session_id": self._sampler, "num_samples": 1, "seq_id": self._number}
        self._number += 1
        asked = await self._post("asample", body | {"prompt": {"chunks": chunks}, "sampling_params": params})
        while True:
            found = await self._post("retrieve_future", {"request_id": asked["request_id"]})
            if found.get("type") != "try_again":
                break
        if not found.get("sequences"):
            raise RuntimeError(f"retrieve_future: {json.dumps(found)[:300]}")

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Sends again after 429. A poll that ends without a result (408) is `try_again`."""
        while True:
            async with self._http.post(path, json=body, headers={"Accept": "application/json"}) as answer:
                if answer.status == 429:
                    await asyncio.sleep(0.5)
                    continue
                if answer.status == 408:
                    return {"type": "try_again"}
                if answer.status != 200:
                    raise RuntimeError(f"{path}: {answer.status} {(await answer.text())[:300]}")
                return await answer.json()


def draw(rng: np.random.Generator) -> bytes:
    """A JPEG of SIDE x SIDE pixels in smooth noise, some 0.9 MB."""
    noise = rng.integers(0, 256, (SIDE // GRAIN, SIDE // GRAIN, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "JPEG", quality=80)
    return file.getvalue()


def text(tokens: list[int]) -> dict[str, Any]:
    return {"type": "encoded_text", "tokens": tokens}


async def _send(url: str, files: list[bytes], in_flight: int) -> dict[str, Any]:
    turns = asyncio.Semaphore(in_flight)
    async with Tenant(url, "tml-pictures") as tenant:

        async def one(file: bytes) -> None:
            async with turns:
                image = {"type": "image", "format": "jpeg", "data": base64.b64encode(file).decode()}
                await tenant.sample([text([VISION_START]), image, text([VISION_END, *TEXT])], 8)

        began = time.perf_counter()
        async with asyncio.timeout(DEADLINE_S):
            ended = await asyncio.gather(*map(one, files), return_exceptions=True)
        seconds = time.perf_counter() - began
    failed = [str(each) for each in ended if isinstance(each, BaseException)]
    return {"seconds": seconds, "errors": len(failed), "first_error": failed[:1], "bytes": len(files[0])}


def main() -> None:
    url, count, in_flight = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = np.random.default_rng()  # without a seed: a server has seen none of the pictures
    files = [draw(rng) for _ in range(count)]
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asyncio.run(_send(url, files, in_flight))), flush=True)


if __name__ == "__main__":
    main()
