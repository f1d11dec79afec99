"""What a forwarded sample costs the client's process: of text, here and in another checkout in turns; with a picture.

Usage: python -m benchmarks.forwarded_pictures [--before CHECKOUT] [--samples N] [--rounds N]

CPU microseconds of a process that forwards samples of 512 tokens with answers of 64 to an upstream that does no work.
`stall` is the longest time that another task of the event loop waited. Starts itself as the forwarding process and as
the upstream, so that both checkouts run the same loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPT, ANSWER, IN_FLIGHT = 512, 64, 64
IMAGE, PICTURE_TOKENS = 7, 256
SIZES = (100_000, 1_000_000, 8_000_000)
"""Bytes of a picture's file."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, help="another checkout, such as a git worktree")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    upstream = subprocess.Popen([sys.executable, __file__, "upstream"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert upstream.stdout is not None
    url = upstream.stdout.readline().strip()
    checkouts = {"here": ROOT} | ({} if given.before is None else {"before": given.before.resolve()})
    try:
        found: dict[str, list[float]] = {name: [] for name in checkouts}
        for _ in range(given.rounds):
            for name, checkout in checkouts.items():
                found[name].append(_forwarded(checkout, url, given.samples, 0)["us"])
        text = {name: statistics.median(values) for name, values in found.items()}
        for name, value in text.items():
            print(f"text, {name:6}: {value:6.1f} us a sample, {min(found[name]):.1f} to {max(found[name]):.1f}")
        if "before" in text:
            least = min(found["here"]) / min(found["before"])
            print(f"text, here / before: {text['here'] / text['before']:.3f} of medians, {least:.3f} of least")
        for size in SIZES:
            with_picture = _forwarded(ROOT, url, max(20, 100_000_000 // size), size)
            print(
                f"a picture of {size:9,} bytes: {with_picture['us']:8.0f} us, stall {with_picture['stall_ms']:.1f} ms"
            )
    finally:
        upstream.kill()
        upstream.wait()


def _forwarded(checkout: Path, url: str, samples: int, size: int) -> dict[str, float]:
    command = [sys.executable, __file__, "forward", url, str(samples), str(size)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(checkout)}, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


async def _forward(url: str, samples: int, size: int) -> None:
    from skyrl.base.types.weights import BaseWeights
    from skyrl.base.wire.sample_request import Distribution
    from skyrl.http.client import HttpClient
    from skyrl.sampling.client import ForwardingClient
    from skyrl.sampling.job import PackedPrompt, SampleJob
    from skyrl.sampling.servers import FixedEndpoint

    options: dict[str, Any] = {}
    more: dict[str, Any] = {}
    if size:
        from skyrl.base.pictures.picture import PlacedPicture
        from skyrl.sampling.job import Pictures

        class Files:
            async def read(self, pictures: Pictures) -> Mapping[str, bytes]:
                return {"digest": file}

        file = os.urandom(size)
        options["pictures"] = Files()
        more["pictures"] = Pictures("tenant", IMAGE, (PlacedPicture(0, PICTURE_TOKENS, "digest", "jpeg"),))
    client = ForwardingClient(
        HttpClient(), FixedEndpoint(url), None, api_key=None, deadline_s=60, **options  # type: ignore[arg-type]
    )  # fmt: skip
    job = SampleJob(
        request_id="r",
        session_key="s:0",
        model="m",
        weights=BaseWeights(),
        prompt=PackedPrompt(_prompt()),
        num_samples=1,
        max_tokens=ANSWER,
        distribution=Distribution(),
        seed=None,
        stop_strings=[],
        stop_token_ids=[],
        ignore_eos=False,
        prompt_logprobs=False,
        prompt_logprobs_last_n=None,
        topk_prompt=0,
        topk_sample=0,
        **more,
    )

    async def forward(count: int) -> None:
        for _ in range(count):
            await client.sample(job)

    stall = [0.0]
    ticking = asyncio.create_task(_tick(stall))
    await asyncio.gather(*(forward(2) for _ in range(IN_FLIGHT)))
    stall[0], began = 0.0, time.process_time()
    each = max(1, samples // IN_FLIGHT)
    await asyncio.gather(*(forward(each) for _ in range(IN_FLIGHT)))
    spent = time.process_time() - began
    ticking.cancel()
    await client.close()
    print(json.dumps({"us": spent / each / IN_FLIGHT * 1e6, "stall_ms": stall[0] * 1e3}))


async def _tick(longest: list[float]) -> None:
    while True:
        slept = time.perf_counter()
        await asyncio.sleep(0.001)
        longest[0] = max(longest[0], time.perf_counter() - slept - 0.001)


def _prompt() -> list[int]:
    return [IMAGE] * PICTURE_TOKENS + [5] * (PROMPT - PICTURE_TOKENS)


def _answers() -> dict[bytes, bytes]:
    """Whole HTTP answers, by the beginning of the path."""
    tokens = list(range(ANSWER))
    content = [{"token_id": token, "logprob": -1.25, "rank": 1, "top_logprobs": []} for token in tokens]
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": tokens}
    completion = {"choices": [choice | {"logprobs": {"token_logprobs": [-1.25] * ANSWER}}]}
    generation = {"choices": [choice | {"logprobs": {"content": content}}], "prompt_token_ids": _prompt()}
    answers = {}
    for path, answer in {b"/v1/completions": completion, b"/inference/v1/generate": generation}.items():
        body = json.dumps(answer).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        answers[path] = head % len(body) + body
    return answers


async def _upstream() -> None:
    answers = _answers()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                left = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
                while left:
                    left -= len(await reader.read(left))
                writer.write(answers[head.split(b" ", 2)[1]])
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=2**22)
    host, port = server.sockets[0].getsockname()
    print(f"http://{host}:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["upstream"]:
            asyncio.run(_upstream())
        case ["forward", url, samples, size]:
            asyncio.run(_forward(url, int(samples), int(size)))
        case _:
            main()
