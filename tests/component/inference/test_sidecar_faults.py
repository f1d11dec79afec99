"""What the sidecar answers when vLLM's answers are wrong or missing, and when requests are aborted or clients leave.

The vLLM here is a fake, because a real one does not lie; tests/component/inference/test_sidecar_vllm.py has the real
one.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from yarl import URL

from skyrl.inference.sidecar.completion import Collected
from tests.component.router_world import Exchange, Script, break_off, steps, until, until_left
from tests.component.sidecar_world import (
    FakeVllm,
    answers,
    choice,
    completion,
    events,
    running_sidecar,
    sidecar_and,
    sidecar_before,
)

LIES: dict[str, dict[str, Any]] = {
    "no logprobs": {"logprobs": None},
    "one logprob for two tokens": {"logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{}, {}]}},
    "a null logprob": {"logprobs": {"token_logprobs": [-0.5, None], "top_logprobs": [{}, {}]}},
    "an impossible token": {"logprobs": {"token_logprobs": [-0.5, -9999.0], "top_logprobs": [{}, {}]}},
    "a probability above 1": {"logprobs": {"token_logprobs": [-0.5, 0.5], "top_logprobs": [{}, {}]}},
    "a logprob that is text": {"logprobs": {"token_logprobs": [-0.5, "-1"], "top_logprobs": [{}, {}]}},
    "no top logprobs": {"logprobs": {"token_logprobs": [-0.5, -0.5], "top_logprobs": None}},
    "tokens named by text": {"logprobs": {"token_logprobs": [-0.5, -0.5], "top_logprobs": [{"a": -1}, {}]}},
    "no tokens": {"token_ids": [], "logprobs": None},
    "tokens that are no numbers": {"token_ids": ["a", "b"]},
    "no finish_reason": {"finish_reason": None},
    "an unknown finish_reason": {"finish_reason": "repetition"},
    "a stop_reason that is no token": {"finish_reason": "stop", "stop_reason": {}},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_wrong_answer_of_vllm_is_an_error(lie: dict[str, Any]) -> None:
    async with sidecar_before(FakeVllm(answers(completion(choice([8, 9]) | lie)))) as sidecar:
        status, answer = await sidecar.generate(return_logprob=True)
        assert (status, [*answer]) == (502, ["error"])
        assert await sidecar.total() == 0


@pytest.mark.parametrize(
    "rows",
    [
        None,
        [None, {"6": {"logprob": -1.0}}],
        [None, {"6": {"logprob": -1.0}}, {"8": {"logprob": -1.0}}],
        [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": None}}],
        [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -9999.0}}],
    ],
)
async def test_wrong_prompt_logprobs_are_an_error(rows: Any) -> None:
    async with sidecar_before(FakeVllm(answers(completion(choice([8], prompt_logprobs=rows))))) as sidecar:
        status, _ = await sidecar.generate(return_logprob=True, logprob_start_len=0)
        assert status == 502


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("400 Bad Request", 400),
        ("404 Not Found", 400),
        ("401 Unauthorized", 502),
        ("500 Internal Server Error", 502),
        ("503 Service Unavailable", 503),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_vllm_keep_their_words(status: str, expected: int, stream: bool) -> None:
    error = {"error": {"message": "vLLM's words", "type": "x", "param": "top_p", "code": 1}}
    async with sidecar_before(FakeVllm(answers(error, status))) as sidecar:
        got, answer = await sidecar.generate(stream=stream)
        assert got == expected
        if expected == 400:
            assert answer["error"]["message"] == "sampling_params.top_p: vLLM's words"
        elif "401" not in status:
            assert "vLLM's words" in answer["error"]["message"]


async def test_without_vllm_the_answer_is_503_at_once() -> None:
    async with running_sidecar("http://127.0.0.1:1") as sidecar:
        for path in ("/health", "/health_generate", "/model_info", "/flush_cache", "/v1/anything"):
            assert (await sidecar.post(path))[0] == 503, path
        assert (await sidecar.generate())[0] == 503
        assert await sidecar.total() == 0


NOT_A_NUMBER = json.dumps(completion(choice([8]))).replace("-0.5", "NaN").encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        (steps(HEAD % len(NOT_A_NUMBER) + NOT_A_NUMBER), None, "JSON"),
        (steps(HEAD % 100 + b"{", break_off), "worker_interrupted", "vLLM's answer broke"),
        (steps(b"nonsense\r\n\r\n", until_left), None, "cannot be read"),
        (steps(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000, until_left), None, "cannot be read"),
    ],
)
async def test_what_is_no_answer_is_502_and_is_not_asked_again(script: Script, code: str | None, message: str) -> None:
    async with sidecar_and(FakeVllm(script)) as (sidecar, vllm):
        status, answer = await sidecar.generate(return_logprob=True)
        assert (status, answer["error"].get("code")) == (502, code)
        assert message in answer["error"]["message"]
    assert len(vllm.bodies) == 1


async def test_a_stream_that_breaks_off_ends_with_an_error_and_done() -> None:
    script = steps(events({"choices": [choice([8], finish_reason=None)]}, done=False), break_off)
    async with sidecar_before(FakeVllm(script)) as sidecar:
        status, answer = await sidecar.generate(stream=True)
        lines = [line for line in answer.decode().split("\n\n") if line]
        assert status == 200
        assert lines[-1] == "data: [DONE]"
        assert "error" in json.loads(lines[-2].removeprefix("data: "))


async def test_chunks_are_cumulative_and_the_last_has_the_finish_reason() -> None:
    second_asked = asyncio.Event()
    chunks = [
        {"choices": [choice([8], finish_reason=None)]},
        {"choices": [choice([9], finish_reason="stop", stop_reason="x")]},
        {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}},
    ]

    async def script(exchange: Exchange) -> None:
        whole = events(*chunks)
        head, _, body = whole.partition(b"\r\n\r\n")
        content = body.split(b"\r\n", 1)[1].split(b"\r\n")[0]
        first, rest = content[: content.index(b"\n\n") + 2], content[content.index(b"\n\n") + 2 :]
        await exchange.send(head + b"\r\n\r\n" + b"%x\r\n%s\r\n" % (len(first), first))
        await second_asked.wait()
        await exchange.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(rest), rest))

    async with sidecar_before(FakeVllm(script)) as sidecar:
        body = {"input_ids": [5, 6, 7], "stream": True, "return_logprob": True}
        async with sidecar.session.post(f"{sidecar.url}/generate", json=body) as answer:
            first = json.loads((await answer.content.readuntil(b"\n\n"))[6:])
            second_asked.set()
            last = json.loads((await answer.content.readuntil(b"\n\n"))[6:])
            assert await answer.content.read() == b"data: [DONE]\n\n"
        assert (first["output_ids"], first["text"], first["meta_info"]["finish_reason"]) == ([8], "<8>", None)
        assert (last["output_ids"], last["text"]) == ([8, 9], "<8><9>")
        assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": "x"}
        assert last["meta_info"]["output_token_logprobs"] == [[-0.5, 8, None], [-0.5, 9, None]]
        assert last["meta_info"]["cached_tokens"] == 2


async def test_numbers_that_vllm_does_not_report_are_left_out() -> None:
    async with sidecar_before(FakeVllm(answers(completion(choice([8]))))) as sidecar:
        _, answer = await sidecar.generate()
        assert "cached_tokens" not in answer["meta_info"]
        assert "output_token_logprobs" not in answer["meta_info"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_vllm(stream: bool) -> None:
    closed = asyncio.Event()
    async with sidecar_and(FakeVllm(steps(until_left, closed.set))) as (sidecar, vllm):
        request = asyncio.create_task(sidecar.generate(stream=stream))
        await until(lambda: bool(vllm.bodies))
        request.cancel()
        await closed.wait()
        while await sidecar.total():
            pass


async def test_an_abort_is_repeated_until_vllm_has_ended_the_sample() -> None:
    """vLLM ignores an abort that comes before it has registered the request."""
    vllm = FakeVllm(answers({}))

    async def script(exchange: Exchange) -> None:
        name = f"cmpl-{exchange.request.header('x-request-id')[0]}-0"
        await until(lambda: sum(name in ids for ids in vllm.aborted) == 3)
        await answers(completion(choice([8], finish_reason="abort")))(exchange)

    vllm.complete = script
    async with sidecar_before(vllm) as sidecar:
        request = asyncio.create_task(sidecar.generate(rid="one-1", return_logprob=True))
        await until(lambda: bool(vllm.bodies))
        assert await sidecar.post("/abort_request", {"rid": "one"}) == (200, b"")
        status, answer = await request
        assert (status, answer["output_ids"]) == (200, [8])
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["meta_info"]["finish_reason"]["message"] == "Aborted"
        assert answer["meta_info"]["output_token_logprobs"] == [[-0.5, 8, None]]
        assert answer["meta_info"]["id"] == "one-1"


async def test_an_abort_that_vllm_never_obeys_closes_the_connection_and_is_answered() -> None:
    closed = asyncio.Event()
    async with sidecar_and(FakeVllm(steps(until_left, closed.set)), abort_s=0.2) as (sidecar, vllm):
        request = asyncio.create_task(sidecar.generate(return_logprob=True))
        await until(lambda: bool(vllm.bodies))
        await sidecar.post("/abort_request", {"abort_all": True})
        status, answer = await request
        await closed.wait()
        assert (status, answer["output_ids"], answer["meta_info"]["output_token_logprobs"]) == (200, [], [])
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_without_development_endpoints_an_abort_keeps_what_was_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    read = asyncio.Event()
    add_chunk = Collected.add_chunk

    def add_and_tell(self: Collected, chunk: Any, *, logprobs: bool) -> None:
        add_chunk(self, chunk, logprobs=logprobs)
        read.set()

    monkeypatch.setattr(Collected, "add_chunk", add_and_tell)
    script = steps(events({"choices": [choice([8, 9], finish_reason=None)]}, done=False), until_left)
    async with sidecar_and(FakeVllm(script, dev_mode=False)) as (sidecar, vllm):
        asked = asyncio.create_task(sidecar.generate(return_logprob=True, rid="a"))
        await until(lambda: bool(vllm.bodies))
        assert vllm.bodies[0]["stream"] is True
        await read.wait()
        await sidecar.post("/abort_request", {"rid": "a"})
        status, answer = await asked
        assert (status, answer["output_ids"]) == (200, [8, 9])
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["meta_info"]["weight_version"] == "default"


async def test_an_abort_reaches_a_request_that_is_not_sent_yet() -> None:
    tokenizing, go_on = asyncio.Event(), asyncio.Event()
    tokenize = steps(tokenizing.set, go_on, answers({"tokens": [1, 2]}))
    vllm = FakeVllm(answers(completion(choice([8]))))
    vllm.answer["/tokenize"] = tokenize
    async with sidecar_before(vllm) as sidecar:
        asked = asyncio.create_task(sidecar.post("/generate", {"text": "a", "rid": "x"}))
        await tokenizing.wait()
        await sidecar.post("/abort_request", {"rid": "x"})
        go_on.set()
        status, answer = await asked
        assert (status, answer["output_ids"]) == (200, [])
        assert answer["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
        assert vllm.bodies == []


async def test_only_the_named_requests_are_aborted() -> None:
    end = asyncio.Event()
    vllm = FakeVllm(answers({}))

    async def script(exchange: Exchange) -> None:
        name = f"cmpl-{exchange.request.header('x-request-id')[0]}-0"
        await until(lambda: end.is_set() or any(name in ids for ids in vllm.aborted))
        finish = "length" if end.is_set() else "abort"
        await answers(completion(choice([8], finish_reason=finish)))(exchange)

    vllm.complete = script
    async with sidecar_before(vllm) as sidecar:
        mine = asyncio.create_task(sidecar.generate(rid="a1"))
        other = asyncio.create_task(sidecar.generate(rid="b1"))
        children = asyncio.create_task(sidecar.generate(rid="a2", sampling_params={"n": 2}))
        await until(lambda: len(vllm.bodies) == 4)
        for body in ({}, {"rid": ""}, {"rid": None, "abort_all": False}, {"rid": "unknown"}):
            assert await sidecar.post("/abort_request", body) == (200, b"")
        assert await sidecar.total() == 4
        await sidecar.post("/abort_request", {"rid": "a"})
        assert (await mine)[1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert [one["meta_info"]["finish_reason"]["type"] for one in (await children)[1]] == ["abort"] * 2
        assert await sidecar.total() == 1
        end.set()
        assert (await other)[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}


def npy(array: Any) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_routed_experts_become_int32(dtype: Any, start: int, stream: bool) -> None:
    experts = np.arange((3 + 2 - 1 - start) * 4 * 2, dtype=dtype).reshape(-1, 4, 2)
    async with sidecar_and(FakeVllm(answers(completion(choice([8, 9], routed_experts=npy(experts)))))) as (
        sidecar,
        vllm,
    ):
        wanted = {"return_routed_experts": True, "routed_experts_start_len": start, "stream": stream}
        _, answer = await sidecar.generate(**wanted)
        if stream:
            answer = json.loads(answer.split(b"\n\n")[0][6:])
        meta = answer["meta_info"]
        read = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(-1, 4, 2)
        assert (read == experts).all()
        assert len(read) == 3 + 2 - 1 - start
        assert meta["routed_experts_start_len"] == start
        assert vllm.bodies[0]["routed_experts_prompt_start"] == start


@pytest.mark.parametrize(
    "experts",
    [
        npy(np.zeros((3, 4, 2), np.uint8)),
        npy(np.zeros((4, 8), np.uint8)),
        npy(np.zeros((4, 4, 2), np.float32)),
        "no base64!",
        base64.b64encode(b"no npy").decode(),
    ],
)
async def test_wrong_routed_experts_are_an_error_unless_aborted(experts: str) -> None:
    async with sidecar_and(FakeVllm(answers(completion(choice([8, 9], routed_experts=experts))))) as (sidecar, vllm):
        assert (await sidecar.generate(return_routed_experts=True))[0] == 502
        vllm.complete = answers(completion(choice([8, 9], routed_experts=experts, finish_reason="abort")))
        status, answer = await sidecar.generate(return_routed_experts=True)
        assert status == 200
        assert "routed_experts" not in answer["meta_info"]


async def test_more_samples_than_allowed_get_503_and_never_fitting_ones_400() -> None:
    end = asyncio.Event()
    async with sidecar_and(FakeVllm(steps(end, answers(completion(choice([8]))))), max_in_flight=2) as (sidecar, vllm):
        both = asyncio.create_task(sidecar.generate(sampling_params={"n": 2}))
        await until(lambda: len(vllm.bodies) == 2)
        async with sidecar.session.post(f"{sidecar.url}/generate", json={"input_ids": [5, 6, 7]}) as refused:
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert (await sidecar.generate(sampling_params={"n": 3}))[0] == 400
        end.set()
        assert (await both)[0] == 200
        assert (await sidecar.generate())[0] == 200


async def test_flush_cache_waits_until_nothing_is_in_flight_or_refuses() -> None:
    end = asyncio.Event()
    vllm = FakeVllm(steps(end, answers(completion(choice([8])))))
    vllm.answer["/reset_prefix_cache"] = answers({"success": True})
    async with sidecar_before(vllm) as sidecar:
        busy = asyncio.create_task(sidecar.generate())
        passing = asyncio.create_task(sidecar.post("/v1/completions", {"prompt": [1]}))
        await until(lambda: len(vllm.bodies) == 2)
        assert await sidecar.total() == 2
        assert (await sidecar.post("/flush_cache"))[0] == 400
        flushing = asyncio.create_task(sidecar.post("/flush_cache?timeout=100"))
        end.set()
        assert (await flushing)[0] == 200
        assert ((await busy)[0], (await passing)[0]) == (200, 200)
        vllm.answer["/reset_prefix_cache"] = answers({"success": False})
        assert (await sidecar.post("/flush_cache"))[0] == 400
        vllm.answer["/reset_prefix_cache"] = answers({"detail": "Not Found"}, "404 Not Found")
        assert (await sidecar.post("/flush_cache"))[0] == 501


async def test_health_generate_sends_no_token_while_paused() -> None:
    async with sidecar_and(FakeVllm(answers(completion(choice([8]))))) as (sidecar, vllm):
        async with sidecar.session.get(
            f"{sidecar.url}/health_generate", headers={"Authorization": "Bearer None"}
        ) as answer:
            assert (answer.status, await answer.read()) == (200, b"")
        assert len(vllm.bodies) == 1
        vllm.answer["/is_paused"] = answers({"is_paused": True})
        assert (await sidecar.post("/health_generate"))[0] == 200
        assert len(vllm.bodies) == 1
        vllm.healthy = False
        assert (await sidecar.post("/health_generate"))[0] == 503
        assert (await sidecar.post("/health"))[0] == 503


async def test_the_version_of_the_weights_is_asked_after_the_sample() -> None:
    vllm = FakeVllm(answers(completion(choice([8]))))

    async def script(exchange: Exchange) -> None:
        vllm.version = "7"
        await answers(completion(choice([8])))(exchange)

    vllm.complete = script
    async with sidecar_before(vllm) as sidecar:
        assert (await sidecar.generate())[1]["meta_info"]["weight_version"] == "7"
        for path in ("/weight_version", "/get_weight_version"):
            assert await sidecar.post(path) == (200, {"weight_version": "7"})
        vllm.answer["/weight_info"] = answers({}, "500 Internal Server Error")
        assert "weight_version" not in (await sidecar.generate())[1]["meta_info"]
        assert (await sidecar.post("/weight_version"))[0] == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_versions_of_tokens_are_vllms_and_the_last_is_the_answers(stream: bool) -> None:
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
    last = choice([8, 9], weight_versions=spans)

    streamed = steps(events({"choices": [last]}, {"choices": [], "usage": {"prompt_tokens": 3}}))
    vllm = FakeVllm(streamed if stream else answers(completion(last)))
    vllm.version = "3"  # the weights have changed since
    async with sidecar_before(vllm) as sidecar:
        _, answer = await sidecar.generate(stream=stream)
        meta = (json.loads(answer.split(b"\n\n")[-3][6:]) if stream else answer)["meta_info"]
        assert (meta["weight_versions"], meta["weight_version"]) == (spans, "2")
        vllm.complete = answers(completion(choice([8])))
        _, answer = await sidecar.generate()
        assert "weight_versions" not in answer["meta_info"]
        assert answer["meta_info"]["weight_version"] == "3"
        vllm.complete = answers(completion(choice([8], weight_versions=spans)))
        assert (await sidecar.generate())[0] == 502


async def test_other_requests_reach_vllm_as_they_are() -> None:
    body = b'{"a": 1.50e-05,  "z":"\xc3\xa9"}'

    async def echo(exchange: Exchange) -> None:
        headers = ("content-type: application/json", "x-own: 1", "set-cookie: a=1", "set-cookie: b=2", "date: today")
        await exchange.answer(b'{"b": 1e-05 }', "418 Teapot", headers)

    vllm = FakeVllm(answers({}))
    vllm.answer["/a%2Fb?x=%2F&x=2"] = echo
    async with sidecar_before(vllm, vllm_api_key="secret") as sidecar:
        headers = {"Content-Type": "text/x", "Authorization": "Bearer None", "X-Foo": "bar"}
        url = URL(f"{sidecar.url}/a%2Fb?x=%2F&x=2", encoded=True)
        async with sidecar.session.put(url, data=body, headers=headers) as answer:
            assert (answer.status, await answer.read()) == (418, b'{"b": 1e-05 }')
            assert answer.headers.getall("set-cookie") == ["a=1", "b=2"]
            assert (answer.headers["x-own"], answer.headers.getall("date")) == ("1", ["today"])
        received = vllm.received[-1]
        assert (received.line, received.body) == ("PUT /a%2Fb?x=%2F&x=2 HTTP/1.1", body)
        assert received.header("content-type") == ["text/x"]
        assert received.header("x-foo") == ["bar"]
        assert received.header("authorization") == ["Bearer secret"]


async def test_a_stream_that_passes_through_arrives_as_it_comes() -> None:
    go_on = asyncio.Event()
    script = steps(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n", go_on, b"1\r\nb\r\n0\r\n\r\n")
    async with (
        sidecar_before(FakeVllm(script)) as sidecar,
        sidecar.session.post(f"{sidecar.url}/v1/completions", data=b"{}") as answer,
    ):
        assert await answer.content.readany() == b"a"
        assert await sidecar.total() == 1
        go_on.set()
        assert await answer.content.read() == b"b"


async def test_a_stopping_sidecar_answers_what_is_in_flight() -> None:
    vllm = FakeVllm(answers({}))

    async def script(exchange: Exchange) -> None:
        await until(lambda: bool(vllm.aborted))
        await answers(completion(choice([8], finish_reason="abort")))(exchange)

    vllm.complete = script
    async with sidecar_before(vllm, drain_s=0.05) as sidecar:
        asked = asyncio.create_task(sidecar.generate())
        await until(lambda: bool(vllm.bodies))
        draining = asyncio.create_task(sidecar.app.drain())
        await until(lambda: sidecar.app.in_flight.draining)
        assert (await sidecar.generate())[0] == 503
        assert (await sidecar.post("/health"))[0] == 503
        await draining
        assert (await asked)[1]["output_ids"] == [8]


@pytest.mark.parametrize(
    ("sample", "options", "path", "body", "status"),
    [
        (completion(choice([8])), {"max_body_bytes": 1000}, "/generate", b" " * 1001, 413),
        (completion(choice([8] * 500)), {}, "/generate", b'{"input_ids":[5,6,7]}', 200),
        (completion(choice([8] * 500)), {"max_answer_bytes": 1000}, "/generate", b'{"input_ids":[5,6,7]}', 502),
        (completion(choice([8] * 500), prompt_tokens=4), {}, "/generate", b'{"input_ids":[5,6,7]}', 502),
        ({}, {}, "/remove_worker?url=http://x", b"", 200),
    ],
)
async def test_bounds_of_bodies_and_what_other_servers_have(
    sample: Any, options: dict[str, int], path: str, body: bytes, status: int
) -> None:
    async with sidecar_before(FakeVllm(answers(sample)), **options) as sidecar:
        assert (await sidecar.post(path, body))[0] == status


async def test_answers_are_compact_json_with_their_length() -> None:
    async with sidecar_before(FakeVllm(answers(completion(choice([8], text="é"))))) as sidecar:
        async with sidecar.session.post(f"{sidecar.url}/generate", json={"input_ids": [5, 6, 7]}) as answer:
            body = await answer.read()
            assert answer.headers["content-length"] == str(len(body))
        assert body == json.dumps(json.loads(body), ensure_ascii=False, separators=(",", ":")).encode()
        assert "é".encode() in body


async def test_an_idle_connection_that_vllm_closes_costs_no_error() -> None:
    calls = 0

    async def script(exchange: Exchange) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            exchange.break_off()
            return
        await answers(completion(choice([8])))(exchange)

    async with sidecar_before(FakeVllm(script)) as sidecar:
        assert (await sidecar.generate())[0] == 200
        assert (await sidecar.generate())[0] == 200
        assert calls == 3


async def test_a_client_gone_during_its_body_is_no_error() -> None:
    async with sidecar_before(FakeVllm(answers({}))) as sidecar:
        host, port = sidecar.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()
        assert (await sidecar.post("/abort_request", b"{"))[0] == 400
        assert await sidecar.total() == 0
