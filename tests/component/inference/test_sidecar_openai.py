"""Completions and chats with SGLang's fields, in front of a vLLM that does what a test says.

test_sidecar_vllm.py has a real one; tests/unit/inference/test_openai_request.py has each field.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
from typing import Any

import numpy as np
import pytest
from vllm_sources import annotated

from skyrl.inference.sidecar.openai_request import (
    CHAT,
    COMPLETIONS,
    OF_VLLM,
    REFUSED,
    SERVED,
    WITHOUT_EFFECT,
)
from tests.component.router_world import Exchange, steps
from tests.component.sglang_server import sglang_source
from tests.component.sidecar_world import CONTEXT, FakeVllm, answers, events, sidecar_and, sidecar_before

IDS = [5, 6, 7]
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
ASKED = {**MESSAGES, "input_ids": IDS, "return_meta_info": True, "logprobs": True}
SPANS = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]


def chat_choice(**fields: Any) -> dict[str, Any]:
    content = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]
    message = {"role": "assistant", "content": "ab", "reasoning": None}
    choice = {"index": 0, "message": message, "logprobs": {"content": content}, "token_ids": [8, 9]}
    return choice | {"finish_reason": "length", "stop_reason": None, "routed_experts": None} | fields


def chat_answer(*choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    whole = {"id": "chatcmpl-1", "choices": [*choices], "usage": usage, "prompt_token_ids": IDS}
    return whole | fields


def talking(*choices: dict[str, Any], **fields: Any) -> FakeVllm:
    vllm = FakeVllm(answers({}))
    vllm.answer[CHAT] = answers(chat_answer(*choices or [chat_choice()], **fields))
    return vllm


def asked_of(vllm: FakeVllm, path: str = CHAT) -> Any:
    return json.loads(next(one.body for one in reversed(vllm.received) if one.path == path))


async def test_every_field_of_sglangs_requests_is_decided() -> None:
    """By its package: none is ignored that changes a sample."""
    source = (sglang_source() / "srt/entrypoints/openai/protocol.py").read_text()
    shared = annotated(source, "PDRoutingFields")
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        fields = annotated(source, name) | shared
        assert len(fields) > 50
        assert fields <= OF_VLLM[COMPLETIONS] | OF_VLLM[CHAT] | SERVED | WITHOUT_EFFECT | REFUSED.keys()


async def test_a_session_server_gets_the_tokens_that_it_sent_for_and_their_meta_info() -> None:
    async with sidecar_and(talking(chat_choice(weight_versions=SPANS))) as (sidecar, vllm):
        status, answer = await sidecar.post(CHAT, ASKED | {"no_stop_trim": False, "model": "m"})
        assert status == 200
        (choice,) = answer["choices"]
        meta = choice["meta_info"]
        assert meta.pop("e2e_latency") > 0
        assert meta.pop("response_sent_to_client_ts") > 0
        assert meta == {
            "id": "chatcmpl-1",
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 1,
            "weight_version": "2",
            "weight_versions": SPANS,
            "input_token_logprobs": [],
            "output_token_logprobs": [[-0.5, 8, None], [-0.25, 9, None]],
        }
        assert (choice["message"]["content"], choice["logprobs"]["content"][0]["token"]) == ("ab", "a")
        assert not {"token_ids", "prompt_token_ids"} & (choice.keys() | answer.keys()), "nobody has asked for them"
        asked = asked_of(vllm)
        assert asked["kv_transfer_params"] == {"prompt_token_ids": IDS}
        assert not asked.keys() & SERVED


async def test_what_a_field_was_ignored_for_reaches_no_vllm() -> None:
    async with sidecar_and(talking()) as (sidecar, vllm):
        for path in (CHAT, COMPLETIONS, "/v1/chat/completions/batch", "/v1/responses", "/v1/messages"):
            status, answer = await sidecar.post(path, {"model": "m", "stop_regex": "b", "foo": 1})
            assert (status, answer["error"]["message"].partition(":")[0]) == (400, "stop_regex")
        assert not [one for one in vllm.received if one.path.startswith("/v1/") and one.path != "/v1/models"]
        body = b'{"messages" : [], "metadata": {"a": 1.50}}'
        assert (await sidecar.post(CHAT, body))[0] == 200
        assert vllm.received[-1].body == body


@pytest.mark.parametrize(
    ("fields", "finish"),
    [
        ({"finish_reason": "stop", "stop_reason": "END"}, {"type": "stop", "matched": "END"}),
        ({"finish_reason": "stop"}, {"type": "stop", "matched": 9}),
        ({"finish_reason": "tool_calls"}, {"type": "tool_calls", "matched": None}),
        (
            {"finish_reason": "abort"},
            {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
        ),
    ],
)
async def test_how_a_sample_ended(fields: dict[str, Any], finish: dict[str, Any]) -> None:
    async with sidecar_before(talking(chat_choice(**fields))) as sidecar:
        _, answer = await sidecar.post(CHAT, ASKED)
        assert answer["choices"][0]["meta_info"]["finish_reason"] == finish


async def test_a_message_has_a_text_and_its_thoughts_under_both_names() -> None:
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": []}
    async with sidecar_before(talking(chat_choice(message=message))) as sidecar:
        _, answer = await sidecar.post(CHAT, ASKED)
        own = {"content": "", "reasoning_content": "hm"}
        assert answer["choices"][0]["message"] == message | own
        _, answer = await sidecar.post(CHAT, MESSAGES | {"input_ids": IDS})
        assert answer["choices"][0]["message"] == message, "nobody asked in SGLang's dialect"


async def test_several_choices_have_their_own() -> None:
    other = chat_choice(index=1, token_ids=[3], logprobs={"content": [{"token": "c", "logprob": -1.0}]})
    async with sidecar_before(talking(chat_choice(), other)) as sidecar:
        _, answer = await sidecar.post(CHAT, ASKED | {"n": 2})
        metas = [choice["meta_info"] for choice in answer["choices"]]
        assert [meta["id"] for meta in metas] == ["chatcmpl-1-0", "chatcmpl-1-1"]
        assert [[one[1] for one in meta["output_token_logprobs"]] for meta in metas] == [[8, 9], [3]]
        assert {meta["weight_version"] for meta in metas} == {"default"}, "asked after the sample"


async def test_ids_come_where_they_are_asked_for() -> None:
    async with sidecar_before(talking()) as sidecar:
        _, answer = await sidecar.post(CHAT, MESSAGES | {"return_prompt_token_ids": True})
        assert answer["choices"][0]["prompt_token_ids"] == IDS
        assert "meta_info" not in answer["choices"][0]
        _, answer = await sidecar.post(CHAT, ASKED | {"return_token_ids": True})
        assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (IDS, [8, 9])


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"prompt_token_ids": [5, 6]}, "vLLM did not sample after input_ids"),
        ({"prompt_token_ids": None}, "no prompt_token_ids"),
        ({"choices": None}, "no choices"),
        ({"choices": [chat_choice(token_ids=None)]}, "no token_ids"),
        ({"choices": [chat_choice(token_ids=[8])]}, "2 logprobs for 1 tokens"),
        ({"choices": [chat_choice(logprobs=None)]}, "no logprobs"),
        ({"choices": [chat_choice(logprobs={"content": [{"logprob": None}] * 2})]}, "the logprob None"),
        ({"choices": [chat_choice(logprobs={"content": [{"logprob": -9999.0}] * 2})]}, "the logprob -9999.0"),
        ({"choices": [chat_choice(finish_reason="error")]}, "the finish_reason 'error'"),
        ({"choices": [chat_choice(weight_versions=SPANS[:1])]}, "cover 1 of 2 tokens"),
        ({"usage": None}, "no usage"),
    ],
)
async def test_an_answer_that_does_not_have_it_is_an_error(fields: dict[str, Any], wrong: str) -> None:
    async with sidecar_before(talking(**fields)) as sidecar:
        status, answer = await sidecar.post(CHAT, ASKED)
        assert status == 502
        assert wrong in answer["error"]["message"]


async def test_a_stream_after_ids_is_checked_before_its_first_byte() -> None:
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    text = {"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [8]}]}
    asked = MESSAGES | {"input_ids": IDS, "stream": True}
    async with sidecar_and(talking()) as (sidecar, vllm):

        async def streamed(*values: Any) -> tuple[int, Any]:
            script = steps(events(*values))
            vllm.answer[CHAT] = script
            return await sidecar.post(CHAT, asked)

        status, stream = await streamed(role | {"prompt_token_ids": IDS}, text)
        lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n\n")]
        assert (status, json.loads(lines[1]), lines[2:]) == (200, text, [b"[DONE]", b""])
        for other in (role, role | {"prompt_token_ids": [1]}):
            status, answer = await streamed(other, text)
            assert (status, "did not sample after input_ids" in answer["error"]["message"]) == (502, True)
        error = {"error": {"message": "full"}}
        assert json.dumps(error).encode() in (await streamed(error))[1]


async def test_a_stream_after_ids_arrives_as_it_comes() -> None:
    first = b'data: {"choices":[{"index":0}],"prompt_token_ids":[5,6,7]}\n\n'
    go_on = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        await exchange.send(head + b"%x\r\n%s\r\n" % (20, first[:20]))
        await exchange.send(b"%x\r\n%s\r\n" % (len(first) - 20, first[20:]))
        await go_on.wait()
        await exchange.send(b"1\r\nb\r\n0\r\n\r\n")

    vllm = talking()
    vllm.answer[CHAT] = script
    asked = json.dumps(MESSAGES | {"input_ids": IDS, "stream": True}).encode()
    async with (
        sidecar_before(vllm) as sidecar,
        sidecar.session.post(sidecar.url + CHAT, data=asked) as answer,
    ):
        assert await answer.content.readexactly(len(first)) == first
        assert await sidecar.total() == 1
        go_on.set()
        assert await answer.content.read() == b"b"


async def test_prompts_without_room_get_sglangs_words() -> None:
    async with sidecar_and(talking()) as (sidecar, vllm):
        for path, more in ((CHAT, MESSAGES), (COMPLETIONS, {})):
            status, answer = await sidecar.post(path, {**more, "input_ids": [5] * CONTEXT})
            assert (status, "longer than the model's context length" in answer["error"]["message"]) == (400, True)
        assert not [one for one in vllm.received if one.path in (CHAT, COMPLETIONS)]


async def test_errors_of_vllm_name_the_clients_field() -> None:
    vllm = talking()
    refusal = {"error": {"message": "out of vocabulary", "param": "kv_transfer_params.prompt_token_ids"}}
    vllm.answer[CHAT] = answers(refusal, "400 Bad Request")
    async with sidecar_before(vllm) as sidecar:
        assert (await sidecar.post(CHAT, ASKED))[1]["error"]["param"] == "input_ids"


async def test_a_completion_has_it_for_each_prompt() -> None:
    def one(index: int, prompt: list[int]) -> dict[str, Any]:
        logprobs = {"token_logprobs": [-0.5], "tokens": ["a"], "top_logprobs": [{"a": -0.5}]}
        choice = {"index": index, "text": "a", "logprobs": logprobs, "token_ids": [8], "prompt_token_ids": prompt}
        return choice | {"finish_reason": "stop", "stop_reason": 8}

    vllm = FakeVllm(answers({"id": "cmpl-1", "choices": [one(0, IDS)], "usage": {"prompt_tokens": 3}}))
    async with sidecar_before(vllm) as sidecar:
        asked = {"input_ids": IDS, "return_meta_info": True, "logprobs": 0}
        _, answer = await sidecar.post(COMPLETIONS, asked)
        meta = answer["choices"][0]["meta_info"]
        assert meta["output_token_logprobs"] == [[-0.5, 8, None]]
        assert meta["finish_reason"] == {"type": "stop", "matched": 8}
        assert asked_of(vllm, COMPLETIONS) == {"prompt": IDS, "logprobs": 0, "return_token_ids": True}
        usage = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
        vllm.complete = answers({"id": "cmpl-1", "choices": [one(0, IDS), one(1, [1, 2])], "usage": usage})
        _, answer = await sidecar.post(COMPLETIONS, {"prompt": [IDS, [1, 2]], "return_meta_info": True})
        metas = [choice["meta_info"] for choice in answer["choices"]]
        assert [meta["prompt_tokens"] for meta in metas] == [3, 2]
        assert not any("cached_tokens" in meta for meta in metas), "vLLM tells those of all prompts together"
        assert not any("output_token_logprobs" in meta for meta in metas), "not asked for"


async def test_routed_experts_are_in_the_meta_info() -> None:
    rows, file = np.arange(12, dtype=np.uint8).reshape(3, 2, 2), io.BytesIO()
    np.save(file, rows)
    vllm = talking(chat_choice(routed_experts=base64.b64encode(file.getvalue()).decode()))
    asked = ASKED | {"return_routed_experts": True, "routed_experts_start_len": 1}
    async with sidecar_before(vllm) as sidecar:
        _, answer = await sidecar.post(CHAT, asked)
        meta = answer["choices"][0]["meta_info"]
        assert np.array_equal(np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4"), rows.ravel())
        assert (meta["routed_experts_start_len"], asked_of(vllm)["routed_experts_prompt_start"]) == (1, 1)
        vllm.answer[CHAT] = answers(chat_answer(chat_choice()))
        assert (await sidecar.post(CHAT, asked))[0] == 501


async def test_an_answer_is_never_compressed_where_it_is_read() -> None:
    async def script(exchange: Exchange) -> None:
        body = json.dumps(chat_answer(chat_choice())).encode()
        if exchange.request.header("accept-encoding"):
            headers = ("content-type: application/json", "content-encoding: gzip")
            await exchange.answer(gzip.compress(body), headers=headers)
        else:
            await exchange.answer(body)

    vllm = talking()
    vllm.answer[CHAT] = script
    async with sidecar_before(vllm) as sidecar:
        for asked, compressed in ((ASKED, False), (MESSAGES, True)):
            headers = {"Accept-Encoding": "gzip"}
            async with sidecar.session.post(sidecar.url + CHAT, json=asked, headers=headers) as answer:
                assert (answer.status, "content-encoding" in answer.headers) == (200, compressed)


async def test_bodies_have_the_bound_of_generate() -> None:
    async with sidecar_before(talking(), max_body_bytes=1000) as sidecar:
        assert (await sidecar.post(CHAT, b'{"messages":[], "user": "' + b"a" * 1000 + b'"}'))[0] == 413
