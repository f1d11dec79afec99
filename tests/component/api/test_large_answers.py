"""Answers of the inference server that are too large, or large for good reason: they are bounded and delay no other
work."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from adapter_hosts import HostWithAllAdapters
from api_harness import Api, Serve, sample_body
from fake_upstream import FakeUpstream, Received, completion, reply
from test_forwarding_failures import JOB, WHOLE, decoded

from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.base.wire.sample_request import Distribution
from skyrl.http.answers import LARGE_ANSWER_BYTES
from skyrl.http.client import HttpClient
from skyrl.http.shared_memory import SharedMemory
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.completion import decode_answer
from skyrl.sampling.exchanges import answer_bound
from skyrl.sampling.job import SampleJob
from skyrl.sampling.servers import FixedEndpoint
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import publish_training

GIB = 2**30
MIB = 2**20
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.fixture
async def client(upstream: FakeUpstream) -> AsyncIterator[ForwardingClient]:
    client = ForwardingClient(
        HttpClient(), FixedEndpoint(upstream.url), HostWithAllAdapters(), api_key=None, deadline_s=300
    )
    yield client
    await client.close()


def resident_peak() -> int:
    """The peak memory of this process in bytes since `reset_peak`."""
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class EndlessAnswer:
    """Sends a GiB in pieces after `head`, for as long as the client reads."""

    def __init__(self, head: bytes, piece: bytes = b"x" * MIB) -> None:
        self._head, self._piece = head, piece
        self.sent = 0

    async def __call__(self, _: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(self._head)
        while self.sent < GIB:
            writer.write(self._piece)
            self.sent += len(self._piece)
            await writer.drain()


WAYS = {
    "with its length": EndlessAnswer(HEAD + b"Content-Length: %d\r\n\r\n" % GIB),
    "without a length": EndlessAnswer(HEAD + b"Connection: close\r\n\r\n"),
    "in chunks": EndlessAnswer(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + b"x" * MIB + b"\r\n"),
    "in tiny chunks": EndlessAnswer(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1;" + b"e" * 1000 + b"\r\nx\r\n"),
    "as a header": EndlessAnswer(HEAD + b"X-Long: "),
    "as headers": EndlessAnswer(HEAD, b"X-Long: 1234567890\r\n" * 10_000),
}


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_of_a_gib_takes_little_memory_and_fails_one_sample(
    client: ForwardingClient, upstream: FakeUpstream, way: str
) -> None:
    endless = WAYS[way]
    upstream.script.append(endless)
    reset_peak()
    before = resident_peak()
    with pytest.raises(FailedRequest) as failed:
        await client.sample(JOB)
    assert resident_peak() - before < 50 * MIB
    assert failed.value.category is ErrorCategory.SERVER
    assert "larger than any right answer to this request" in failed.value.message
    assert len(failed.value.message) < 600
    assert client.counts == {"malformed": 1}
    assert endless.sent < 100 * MIB, "the client closed the connection early"
    assert decoded(await client.sample(JOB)) == WHOLE, "the next answer is read"


async def test_a_refusal_of_the_inference_server_is_bounded(client: ForwardingClient, upstream: FakeUpstream) -> None:
    upstream.script.append(reply(400, b"x" * 3 * MIB, "text/plain"))
    many = msgspec.structs.replace(JOB, num_samples=1000, max_tokens=1000)
    with pytest.raises(FailedRequest) as failed:
        await client.sample(many)
    assert "status 400, text/plain: 'xxx" in failed.value.message
    assert client.counts == {"refused": 1}


def rows(prompt: Sequence[int], columns: int) -> list[Any]:
    """vLLM's rows for a prompt: for each token the token itself and `columns` others, the best first."""
    return [None] + [
        {str(token): {"logprob": -9.0 - index % 7, "rank": 9, "decoded_token": "x" * 9}}
        | {
            str(1000 + index + k): {"logprob": -0.5 - k / 100, "rank": k + 1, "decoded_token": "x" * 9}
            for k in range(columns)
        }
        for index, token in enumerate(prompt[1:], 1)
    ]


def scored(job: SampleJob) -> bytes:
    """A complete answer in vLLM's format, as to one request for the whole job: each choice repeats the prompt rows."""
    sent = {"prompt": job.prompt, "max_tokens": job.max_tokens, "n": job.num_samples, "model": job.model}
    body = completion(sent)
    given = rows(job.prompt, job.topk_prompt)
    for choice in body["choices"]:
        choice |= {"prompt_logprobs": given, "prompt_token_ids": job.prompt}
    return json.dumps(body).encode()


SCORED = msgspec.structs.replace(
    JOB, prompt=[7] * 2000, num_samples=16, max_tokens=4, prompt_logprobs=True, topk_prompt=20, seed=5
)


async def answer_scored(received: Received, writer: asyncio.StreamWriter) -> None:
    """Answer as vLLM does: with prompt rows in each choice if the request asks for them."""
    sent = received.json
    body = completion({key: value for key, value in sent.items() if key != "prompt_logprobs"})
    if "prompt_logprobs" in sent:
        given = rows(sent["prompt"], sent["prompt_logprobs"])
        for choice in body["choices"]:
            choice["prompt_logprobs"] = given
    hits = 0 if "prompt_logprobs" in sent else len(sent["prompt"]) - 16
    body["usage"]["prompt_tokens_details"] = {"cached_tokens": hits}
    await reply(200, body)(received, writer)


async def test_prompt_logprobs_are_requested_once_and_apart_from_the_sequences(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    upstream.default = answer_scored
    answer = await client.sample(SCORED, priority=3)
    first, second = (request.json for request in upstream.completions)
    assert (first["n"], first["max_tokens"], first["prompt_logprobs"], first["priority"]) == (1, 1, 20, 3)
    assert (second["n"], second["max_tokens"], second["seed"], second["priority"]) == (16, 4, 5, 3)
    assert "prompt_logprobs" not in second
    assert {request.headers["x-session-id"] for request in upstream.completions} == {SCORED.session_key}

    whole = pb.SampleResponse.FromString(decode_whole(SCORED))
    given = pb.SampleResponse.FromString(answer.body)
    assert given == whole, "the result equals that of a single request"
    assert len(given.sequences) == 16
    assert (answer.prompt_tokens, answer.sampled_tokens) == (2000, 64)
    assert (answer.cached_tokens, given.prompt_cache_hit_tokens) == (0, 0), "the prompt was computed once"
    assert np.frombuffer(given.prompt_logprobs, np.float32)[1:4].tolist() == [-10.0, -11.0, -12.0]


def decode_whole(job: SampleJob) -> bytes:
    return decode_answer(scored(job), job).body


@pytest.mark.parametrize(
    "changes",
    [{"num_samples": 1}, {"distribution": Distribution(temperature=0.0)}, {"prompt_logprobs": False, "topk_prompt": 0}],
    ids=["one sample", "greedy", "no prompt logprobs"],
)
async def test_a_sample_without_prompt_logprobs_is_one_request(
    client: ForwardingClient, upstream: FakeUpstream, changes: dict[str, Any]
) -> None:
    upstream.default = answer_scored
    await client.sample(msgspec.structs.replace(SCORED, **changes))
    assert len(upstream.completions) == 1


async def test_both_requests_share_one_deadline_and_either_failure_fails_the_sample(
    client: ForwardingClient, upstream: FakeUpstream
) -> None:
    upstream.script += [answer_scored, reply(400, "no such seed", "text/plain")]
    with pytest.raises(FailedRequest, match="no such seed"):
        await client.sample(SCORED)
    assert len(upstream.completions) == 2


def test_correct_answers_are_within_their_bound() -> None:
    for changes in ({}, {"num_samples": 1}, {"topk_prompt": 64, "prompt": [7] * 8000, "num_samples": 1}):
        job = msgspec.structs.replace(SCORED, **changes)
        assert len(scored(job)) < answer_bound(msgspec.structs.replace(job, num_samples=1)) * job.num_samples


def test_the_bound_for_sampled_tokens_is_a_few_times_their_size() -> None:
    """The case is 16 x 2,000 tokens with the 20 best each. Each token is named by its id, so no cell is long."""
    job = msgspec.structs.replace(JOB, num_samples=16, max_tokens=2000, topk_sample=20)
    longest = {f"token_id:{2**31 - 1 - k}": -1234.5678901234567 for k in range(21)}
    body = completion({"prompt": job.prompt, "max_tokens": 2000, "n": 16, "model": job.model, "logprobs": 0})
    for choice in body["choices"]:
        choice["logprobs"]["top_logprobs"] = [longest] * 2000
    size = len(json.dumps(body))
    assert 25 * MIB < size < answer_bound(job) < 4 * size


async def test_large_answers_do_not_delay_heartbeats(serve: Serve, upstream: FakeUpstream, database: Database) -> None:
    """Heartbeats stay quick while samples with 16 sequences, 2,000 prompt tokens and the 20 best tokens of each are
    computed.

    The comparison is decoding one answer that repeats the prompt in every choice: on the event loop, heartbeats would
    wait that long. Both are measured here, on the same machine. With `-s` the test prints the figures.
    """
    whole = scored(SCORED)

    def decoding_s() -> float:
        began = time.perf_counter()
        decode_answer(whole, SCORED)
        return time.perf_counter() - began

    before_s = decoding_s()
    prompt = [7] * 2000
    chunks = {"chunks": [{"tokens": prompt}]}
    one = {"prompt_logprobs": True, "topk_prompt_logprobs": 20, "num_samples": 16, "prompt": chunks}
    upstream.default = answer_with_prepared_bodies()
    database.write(lambda c: publish_training(c, ready=True, reason="", vocab_size=1000, max_context=4096))
    async with serve() as api:
        sampler = await api.sampler()
        waits = await heartbeats_while(api, sampler, [sample_body(sampler, i) | one for i in range(12)])
    whole_s = max(before_s, decoding_s())  # measured again, because the machine may have become busy
    p50, p99 = np.quantile(waits, [0.5, 0.99])
    print(f"{len(waits)} heartbeats: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, max {max(waits) * 1e3:.1f} ms;")
    print(f"one answer of {len(whole) / 1e6:.0f} MB is decoded in {whole_s * 1e3:.0f} ms")
    assert len(upstream.completions) == 24
    assert np.quantile(waits, 0.75) < whole_s / 2, (
        "the slowest heartbeats do not count, because a busy machine may delay any of them"
    )


def answer_with_prepared_bodies() -> Any:
    """`answer_scored` with bodies built beforehand, because the upstream shares the measured event loop."""
    ready = {with_rows: prepare_body(with_rows=with_rows) for with_rows in (True, False)}

    async def send(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(ready[b'"prompt_logprobs"' in received.body])
        await writer.drain()

    return send


def prepare_body(*, with_rows: bool) -> bytes:
    job = msgspec.structs.replace(SCORED, num_samples=1) if with_rows else SCORED
    body = json.loads(scored(job))
    if not with_rows:
        for choice in body["choices"]:
            choice["prompt_logprobs"] = None
    content = json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content


async def heartbeats_while(api: Api, sampler: str, samples: list[dict[str, Any]]) -> list[float]:
    """Seconds that each heartbeat took while the samples were sent, computed and fetched."""
    session = sampler.partition(":")[0]
    waits: list[float] = []
    done = asyncio.Event()

    async def beat() -> None:
        while not done.is_set():
            began = time.perf_counter()
            assert (await api.post("session_heartbeat", {"session_id": session})).status_code == 200
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(0.002)

    async def run(sample: dict[str, Any]) -> None:
        promise = await api.post("asample", sample)
        assert promise.status_code == 200, promise.text
        answer = await api.result(promise.json()["request_id"])
        assert len(pb.SampleResponse.FromString(answer.content).sequences) == 16

    beating = asyncio.create_task(beat())
    await asyncio.gather(*(run(sample) for sample in samples))
    done.set()
    await beating
    return waits


# Memory for answers in flight


def test_memory_for_answers_is_granted_in_order_and_returned_once() -> None:
    memory, granted = SharedMemory(10), list[str]()
    first = memory.reserve(6, lambda: granted.append("first"))
    large = memory.reserve(11, lambda: granted.append("large"))
    last = memory.reserve(4, lambda: granted.append("last"))
    assert granted == ["first"], "an answer larger than the bound waits until it is alone, and none overtakes it"
    first.release()
    first.release()
    assert granted == ["first", "large"]
    large.release()
    assert granted == ["first", "large", "last"]
    last.release()
    waiting = [memory.reserve(8, lambda: granted.append("again")) for _ in range(2)]
    waiting[1].release()  # this waiter gives up
    waiting[0].release()
    assert granted.count("again") == 1
    assert memory.reserve(10, lambda: None).granted


async def test_large_answers_are_read_when_memory_is_free(upstream: FakeUpstream) -> None:
    transport = HttpClient(memory_bytes=LARGE_ANSWER_BYTES)
    upstream.default = reply(200, b"x" * 8 * MIB, "text/plain")

    async def ask() -> Any:
        return await transport.post(f"{upstream.url}/v1/completions", b'{"model": "m"}', {}, 300, 100 * MIB)

    tasks = {asyncio.create_task(ask()) for _ in range(4)}
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await upstream.until(lambda server: len(server.completions) == 4)
    for _ in range(20):
        assert (await transport.get(f"{upstream.url}/health", {}, 300)).status == 200, "small answers do not wait"
    assert len(done) == 1, "the other answers wait, although the server has sent them"
    assert not any(task.done() for task in waiting)
    cancelled = waiting.pop()
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    while waiting:
        done.pop().result().release()
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        assert len(next(iter(done)).result().body) == 8 * MIB
    await transport.close()
