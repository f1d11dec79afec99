"""Samples with pictures through the forwarding client, over real sockets, against a scripted upstream."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
from adapter_hosts import HostWithAllAdapters
from engine_harness import until
from fake_upstream import FakeUpstream, Received, Reply, error, fake_upstream, hang_up, never, reply

from skyrl.base.pictures.picture import PlacedPicture, digest_of
from skyrl.base.types.weights import AdapterVersion
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.http.client import HttpClient
from skyrl.sampling import pictures as generation
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.completion import SampleAnswer
from skyrl.sampling.exchanges import MAX_FILES_BYTES, MAX_SENDS
from skyrl.sampling.job import Pictures, SampleJob
from skyrl.sampling.servers import FixedEndpoint
from skyrl.storage.db.pictures import PictureFiles
from tests.sample_jobs import JOB as TEXT_JOB

IMAGE = 99
FILE = bytes(range(256)) * 4096 * 2
"""2 MiB: several pieces."""
PICTURE = PlacedPicture(1, 2, digest_of(FILE), "png")
JOB = msgspec.structs.replace(
    TEXT_JOB, prompt=[5, IMAGE, IMAGE, 6], pictures=Pictures("tenant", IMAGE, (PICTURE,)), session_key="s1:pictures:1"
)
ADAPTER = msgspec.structs.replace(JOB, model="m1@1", weights=AdapterVersion("m1@1"))


class Files(PictureFiles):
    """The stored files, and how often they were read."""

    def __init__(self) -> None:
        self.stored = {PICTURE.digest: bytes(bytearray(FILE))}  # a copy, to which nothing else refers
        self.reads = 0

    async def of(self, pictures: Pictures) -> dict[str, bytes]:
        self.reads += 1
        for picture in pictures.placed:
            if picture.digest not in self.stored:
                raise FailedRequest("the image is not stored any more", ErrorCategory.USER)
        return dict(self.stored)


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with fake_upstream() as server:
        script.clear()
        server.controls[generation.PATH] = next_reply
        yield server


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
async def client(upstream: FakeUpstream, files: Files) -> AsyncIterator[ForwardingClient]:
    endpoint, host = FixedEndpoint(upstream.url), HostWithAllAdapters()
    made = ForwardingClient(HttpClient(), endpoint, host, api_key="key", deadline_s=20.0, pictures=files)
    yield made
    await made.close()


script: deque[Reply] = deque()
"""The next replies; after them each request gets `generated`."""


async def next_reply(request: Received, writer: asyncio.StreamWriter) -> None:
    await (script.popleft() if script else generated())(request, writer)


def generated(tokens: int = 2) -> Reply:
    """A whole answer of a server that makes so many tokens of a picture."""

    async def send(request: Received, writer: asyncio.StreamWriter) -> None:
        given, params = request.json, request.json["sampling_params"]
        prompt: list[int] = []
        for token in given["token_ids"]:
            prompt += [token] * (tokens if token == IMAGE else 1)
        at = prompt.index(IMAGE)
        content = [{"token_id": token, "logprob": -1.0 - token} for token in range(params["max_tokens"])]
        choice = {"finish_reason": "length", "token_ids": list(range(len(content))), "logprobs": {"content": content}}
        rows = [None, *({str(token): {"logprob": -0.5}} for token in prompt[1:])]
        body = {
            "choices": [choice | {"index": index} for index in range(params["n"])],
            "prompt_token_ids": prompt,
            "mm_placeholders": {"image": [{"offset": at, "length": tokens}]},
            "prompt_logprobs": rows if "prompt_logprobs" in params else None,
        }
        await reply(200, body)(request, writer)

    return send


def requests(upstream: FakeUpstream) -> list[dict[str, Any]]:
    return [request.json for request in upstream.requests if request.path == generation.PATH]


def tokens_of(answer: SampleAnswer) -> list[list[int]]:
    sequences = pb.SampleResponse.FromString(answer.body).sequences
    return [np.frombuffer(sequence.tokens, np.int32).tolist() for sequence in sequences]


async def test_the_files_of_a_job_arrive_whole_with_one_token_for_each_picture(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    assert tokens_of(await client.sample(JOB, priority=3)) == [[0, 1, 2]]
    (sent,) = requests(upstream)
    (part,) = sent["content_parts"]
    assert base64.b64decode(part["url"].removeprefix("data:image/png;base64,")) == FILE
    assert (part["uuid"], sent["token_ids"], sent["priority"]) == (PICTURE.digest, [5, IMAGE, 6], 3)
    assert upstream.requests[0].headers["x-request-id"] == JOB.request_id


async def test_a_job_of_text_goes_to_completions_and_reads_no_files(
    client: ForwardingClient, upstream: FakeUpstream, files: Files
) -> None:
    await client.sample(TEXT_JOB)
    assert (len(upstream.completions), requests(upstream), files.reads) == (1, [], 0)


@pytest.mark.parametrize("first", [error(503, "loading"), hang_up, error(500, "broke")], ids=["503", "reset", "500"])
async def test_a_sample_that_is_sent_again_has_its_files_again(
    client: ForwardingClient, upstream: FakeUpstream, files: Files, first: Reply
) -> None:
    script.append(first)
    assert tokens_of(await client.sample(JOB)) == [[0, 1, 2]]
    first_try, second_try = requests(upstream)
    assert first_try == second_try
    assert files.reads == 2


async def test_prompt_logprobs_of_several_samples_are_asked_for_apart(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    answer = await client.sample(msgspec.structs.replace(JOB, num_samples=3, prompt_logprobs=True))
    assert len(tokens_of(answer)) == 3
    logprobs = np.frombuffer(pb.SampleResponse.FromString(answer.body).prompt_logprobs, np.float32)
    assert logprobs[1:].tolist() == [-0.5] * 3
    assert [sent["sampling_params"]["n"] for sent in requests(upstream)] == [1, 3]


async def failure_of(client: ForwardingClient, job: SampleJob = JOB) -> FailedRequest:
    with pytest.raises(FailedRequest) as failed:
        await client.sample(job)
    return failed.value


async def test_another_number_of_tokens_fails_the_sample_with_both_numbers(client: ForwardingClient) -> None:
    script.append(generated(tokens=3))
    failed = await failure_of(client)
    assert failed.category is ErrorCategory.SERVER
    assert "made 3 tokens of image 1 of the prompt, and this server counted 2" in str(failed)
    assert client.counts["malformed"] == 1


SWITCHED_OFF = (
    "The render, derender and token-in-token-out endpoints are not enabled. Start the server with --enable-scale-out "
    "to enable them."
)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (error(403, SWITCHED_OFF), "start vLLM with --enable-scale-out"),
        (reply(404, b'{"detail":"Not Found"}'), "it has no /inference/v1/generate"),
    ],
    ids=["switched off", "unknown"],
)
@pytest.mark.parametrize("job", [JOB, ADAPTER], ids=["base model", "adapter"])
async def test_a_server_without_the_route_fails_the_sample_with_the_reason(
    client: ForwardingClient, upstream: FakeUpstream, answer: Reply, message: str, job: SampleJob
) -> None:
    script.append(answer)
    failed = await failure_of(client, job)
    assert failed.category is ErrorCategory.SERVER
    assert message in str(failed)
    assert upstream.loads == []


async def test_a_file_that_is_not_stored_any_more_fails_its_sample_alone(
    client: ForwardingClient, files: Files
) -> None:
    kept, files.stored = files.stored, {}
    for _ in range(MAX_SENDS + 1):
        assert "not stored any more" in str(await failure_of(client))
    files.stored = kept
    assert tokens_of(await client.sample(JOB)) == [[0, 1, 2]]


async def test_a_sample_that_waits_for_its_answer_keeps_no_file(
    client: ForwardingClient, upstream: FakeUpstream, files: Files
) -> None:
    script.append(never)

    def references() -> int:
        return sys.getrefcount(files.stored[PICTURE.digest])

    before = references()
    sample = asyncio.create_task(client.sample(JOB))
    await upstream.until(lambda server: server.busy == 1)
    await until(lambda: references() == before)  # once the client sees that all has been sent
    assert files.reads == 1
    assert not sample.done()
    sample.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sample


async def test_more_bytes_than_a_router_takes_fail_before_they_are_sent(
    client: ForwardingClient, upstream: FakeUpstream, files: Files
) -> None:
    files.stored[PICTURE.digest] = bytes(MAX_FILES_BYTES // 3 + 1)
    placed = tuple(msgspec.structs.replace(PICTURE, start=start) for start in (0, 2, 4))
    pictures = Pictures("tenant", IMAGE, placed)
    failed = await failure_of(client, msgspec.structs.replace(JOB, prompt=[IMAGE] * 6, pictures=pictures))
    assert failed.category is ErrorCategory.USER
    assert f"one prompt may have {MAX_FILES_BYTES}" in str(failed)
    assert requests(upstream) == []


class SlowServer:
    """Takes connections, and reads from none until it may."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.taken = asyncio.Semaphore(0)
        """Once for each connection."""
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken.release()
        await self.may_read.wait()
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        await generated()(Received("POST", generation.PATH, {}, json.dumps(body).encode()), writer)
        await writer.drain()
        await close(writer)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_only_so_many_samples_hold_files_while_a_server_reads_nothing(files: Files) -> None:
    large = bytes(8 * 2**20)  # more than the system's buffers take
    picture = msgspec.structs.replace(PICTURE, digest=digest_of(large))
    files.stored[picture.digest] = large
    of_large = msgspec.structs.replace(JOB, pictures=Pictures("tenant", IMAGE, (picture,)))
    server = SlowServer()
    listening = await asyncio.start_server(server.take, sock=server.socket)
    endpoint, host = FixedEndpoint(server.url), HostWithAllAdapters()
    client = ForwardingClient(HttpClient(), endpoint, host, api_key=None, deadline_s=60.0, pictures=files)
    jobs = [msgspec.structs.replace(of_large, request_id=f"r{number}") for number in range(MAX_SENDS + 3)]
    samples = [asyncio.create_task(client.sample(job)) for job in jobs]
    async with asyncio.timeout(60):
        for _ in range(MAX_SENDS):
            await server.taken.acquire()
        await asyncio.sleep(0.2)
        assert server.taken.locked()
        assert files.reads == MAX_SENDS
        server.may_read.set()
        assert [tokens_of(answer) for answer in await asyncio.gather(*samples)] == [[[0, 1, 2]]] * len(jobs)
    await client.close()
    listening.close()
    await listening.wait_closed()


async def test_an_answer_that_comes_before_the_body_has_been_sent_is_read(files: Files) -> None:
    """A proxy refuses a body that is too long without reading it."""
    ended = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"error": {"message": "too long"}}'
        writer.write(b"HTTP/1.1 413 x\r\nContent-Type: a/b\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        with contextlib.suppress(ConnectionError):
            await reader.read()  # until the client closes the connection
        await close(writer)
        ended.set()

    listening = await asyncio.start_server(refuse, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    endpoint = FixedEndpoint(f"http://{host}:{port}")
    client = ForwardingClient(
        HttpClient(), endpoint, HostWithAllAdapters(), api_key=None, deadline_s=20.0, pictures=files
    )
    assert str(await failure_of(client)) == "too long"
    await client.close()
    await ended.wait()
    listening.close()
    await listening.wait_closed()
