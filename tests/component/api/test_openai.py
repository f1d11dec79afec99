"""OpenAI requests through a whole API process: names of models, turns and bounds, keys, and the shape of errors. The
upstream on a real socket answers as each test tells it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from api_harness import BASE, Api, Serve
from engine_harness import until
from fake_upstream import FakeUpstream, Received, after, error, never, reply
from openai_requests import (
    ADAPTER,
    ONE,
    PATH,
    PROMPT,
    RUN,
    TWO,
    USAGE,
    Connection,
    answer_of,
    ask,
    complete,
    counted,
    data_of,
    events,
    piece,
    refusal,
    save,
)
from sqlalchemy import select

from skyrl.api.table import BodyMemoryHook
from skyrl.base.tiny import tools
from skyrl.base.types.weights import FullWeights
from skyrl.inference import features
from skyrl.inference.vllm_plugin.protocol import TENANT_TAGS, TOKENS_ONLY
from skyrl.storage.db import keys
from skyrl.storage.db import quotas as quota_rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import futures
from skyrl.storage.db.usage import UsageKind

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"


async def chat_answer(request: Received, writer: asyncio.StreamWriter) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    choice |= {"token_ids": [5], "logprobs": {"content": [{"token": "token_id:5", "logprob": -1.0}]}}
    own = {"prompt_token_ids": [1, 2, 3], "choices": [choice]}
    await reply(200, answer_of(request) | own)(request, writer)


@pytest.fixture(autouse=True)
def answers(upstream: FakeUpstream) -> None:
    upstream.default = complete


# Names


async def test_an_answer_has_the_callers_name_and_no_field_of_the_server(
    api: Api, upstream: FakeUpstream, database: Database
) -> None:
    save(database)
    for name in (BASE, PATH, f"{BASE};{PATH}"):
        answer = await ask(api, PROMPT | {"model": name})
        choice = {"index": 0, "text": "hi", "finish_reason": "stop"}
        assert answer.json() == {"id": "cmpl-1", "model": name, "choices": [choice], "usage": USAGE}
        upstream.script.append(events(piece("hi", 2, "stop")))
        first, *_ = data_of(await ask(api, PROMPT | {"model": name, "stream": True}))
        assert first == {"id": "cmpl-1", "model": name, "choices": [choice]}
    assert [r.json["model"] for r in upstream.completions] == [BASE, BASE, *([ADAPTER.name] * 4)]


async def test_a_request_has_the_callers_id_and_a_priority_and_leaves_no_row(
    api: Api, upstream: FakeUpstream, database: Database
) -> None:
    await ask(api, PROMPT | {"user": "me", "stop": None}, **{"X-Request-Id": "mine-1"})
    (sent,) = upstream.completions
    assert sent.headers["x-request-id"] == sent.headers["x-session-id"] == "mine-1"
    assert TOKENS_ONLY not in sent.headers, "the caller wants text"
    assert sent.json.keys() == {"model", "prompt", "max_tokens", "stream", "priority"}
    assert database.read(lambda c: list(c.execute(select(futures.c.id)))) == []


@pytest.mark.parametrize("prefix", ["/v1", "/oai/api/v1"])
async def test_the_list_of_models_has_the_served_names_and_the_callers_own_checkpoints(
    api: Api, upstream: FakeUpstream, database: Database, prefix: str
) -> None:
    save(database)
    save(database, "training", kind="weights", weights=None)
    save(database, "public", public=True, tenant=TWO)
    save(database, "theirs", tenant=TWO)
    save(database, "whole", weights=FullWeights.of(RUN, 4))
    listed = (await api.http.get(f"{prefix}/models")).json()
    assert [model["id"] for model in listed["data"]] == [BASE, PATH]
    assert not upstream.requests
    public = PATH.replace("/a", "/public")
    for name in (BASE, PATH, public):
        assert (await api.http.get(f"{prefix}/models/{name}")).json()["id"] == name
    answer = await ask(api, PROMPT | {"model": public}, f"{prefix}/completions")
    assert answer.json()["model"] == public


async def test_a_request_without_a_model_is_for_the_only_base_model(api: Api, upstream: FakeUpstream) -> None:
    """As AReaL sends completions without an adapter, and as vLLM takes them."""
    upstream.controls |= {CHAT: chat_answer, GENERATE: complete}
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (
        ("/v1/completions", {"prompt": [5, 6]}),
        (CHAT, messages),
        (CHAT, messages | {"model": None}),
        ("/v1/responses", {"input": "hi"}),
        (GENERATE, {"token_ids": [5, 6], "sampling_params": {}}),
    ):
        answer = await ask(api, body, path)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == upstream.requests[-1].json["model"] == BASE


async def test_an_agents_request_without_a_model_is_for_its_sessions(api: Api, upstream: FakeUpstream) -> None:
    upstream.controls |= {CHAT: chat_answer, "/tokenize": reply(200, {"count": 3})}
    made = (await api.post("agent_sessions", {"model": BASE})).json()
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for changes in ({}, {"model": None}):
        answer = await ask(api, body | changes, CHAT, Authorization=f"Bearer {made['key']}")
        assert answer.json()["model"] == BASE


@pytest.mark.parametrize("takes", [True, False])
async def test_documents_go_on_where_the_template_takes_them(
    serve: Serve, upstream: FakeUpstream, tmp_path: Path, takes: bool
) -> None:
    """vLLM gives them to the template; one that does not read them would leave them out silently."""
    model = tmp_path / "model"
    tools.make(model)
    if takes:
        (model / "chat_template.jinja").write_text("{{ documents }}{{ messages }}")
    upstream.controls[CHAT] = chat_answer
    documents = [{"title": "a", "text": "b"}]
    body = {"messages": [{"role": "user", "content": "hi"}], "documents": documents}
    async with serve(base_model=str(model), served_model_names=(BASE,)) as api:
        answer = await ask(api, body, CHAT)
    if takes:
        assert upstream.requests[-1].json["documents"] == documents
    else:
        assert refusal(answer) == (400, "documents", None)


async def test_a_template_gets_an_effort_that_it_takes(serve: Serve, upstream: FakeUpstream, tmp_path: Path) -> None:
    """Codex asks for `medium`, which Hy3's template refuses."""
    model = tmp_path / "model"
    tools.make(model)
    (model / "chat_template.jinja").write_text(
        "{% if reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('no') }}{% endif %}"
    )
    upstream.controls[CHAT] = chat_answer
    body = {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "medium"}
    async with serve(base_model=str(model), served_model_names=(BASE,)) as api:
        assert (await ask(api, body, CHAT)).status_code == 200
        assert (await ask(api, {"input": "hi", "reasoning": {"effort": "none"}}, "/v1/responses")).status_code == 200
    high, off = (request.json for request in upstream.requests)
    assert "reasoning_effort" not in high | off
    assert high["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "high"}
    assert off["chat_template_kwargs"] == {"enable_thinking": False, "reasoning_effort": "no_think"}


async def test_the_log_says_once_that_the_cookbooks_prompts_are_others(
    serve: Serve, upstream: FakeUpstream, database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a family whose template and renderer differ, and for checkpoints alone: who asks the base model has trained
    nothing."""
    model = tmp_path / "model"
    tools.make(model)
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / "chat_template.jinja").write_text("Cutting Knowledge Date: December 2023 {{ messages }}")
    save(database)
    upstream.controls[CHAT] = chat_answer
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with serve(base_model=str(model), served_model_names=(BASE,)) as api:
        for body, path in ((chat, CHAT), (PROMPT | {"model": PATH}, "/v1/completions")):
            assert (await ask(api, body, path)).status_code == 200
        assert "tinker-cookbook" not in caplog.text
        for _ in range(2):
            assert (await ask(api, chat | {"model": PATH}, CHAT)).status_code == 200
    assert caplog.text.count("sees other prompts here than in training, because the template begins each chat") == 1


# vLLM's route for token ids


async def test_token_ids_are_served_as_a_completion_is(api: Api, upstream: FakeUpstream, database: Database) -> None:
    save(database)
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "logprobs": 1}}

    async def tokens(request: Received, writer: asyncio.StreamWriter) -> None:
        content = [{"token_id": 9, "logprob": -0.5, "rank": 1, "top_logprobs": []}]
        choice = {"index": 0, "finish_reason": "stop", "token_ids": [9], "logprobs": {"content": content}}
        told = {"request_id": "generate-tokens-mine", "output_mode": "tokens", "choices": [choice]}
        await reply(200, answer_of(request) | told)(request, writer)

    upstream.controls[GENERATE] = tokens
    for path in (GENERATE, f"/oai/api{GENERATE}"):
        answer = await ask(api, body | {"model": PATH}, path, **{"X-Request-Id": "mine"})
        assert answer.status_code == 200
        (choice,) = answer.json()["choices"]
        assert choice["token_ids"] == [9]
        assert choice["logprobs"]["content"][0]["token"] == "token_id:9"
        assert answer.json().keys() == {"id", "request_id", "model", "usage", "output_mode", "choices"}
        assert answer.json()["model"] == PATH
        sent = upstream.requests[-1]
        assert (sent.path, sent.json["model"]) == (GENERATE, ADAPTER.name)
        assert sent.headers["x-request-id"] == "mine"
    kinds = UsageKind.PREFILL, UsageKind.PREFILL_CACHED, UsageKind.SAMPLE
    assert await counted(api, database) == dict(zip(kinds, (4, 2, 4), strict=True))


async def test_a_stream_of_token_ids_has_names_and_the_callers_model(api: Api, upstream: FakeUpstream) -> None:
    logprobs = {"content": [{"token_id": 9, "logprob": -0.5, "rank": 1, "top_logprobs": []}]}
    choice = {"index": 0, "token_ids": [9], "logprobs": logprobs, "finish_reason": None}
    upstream.controls[GENERATE] = events({"choices": [choice], "usage": USAGE})
    body = {"token_ids": [5], "sampling_params": {}, "stream": True}
    event, *_ = data_of(await ask(api, body, GENERATE))
    assert event["model"] == BASE
    assert event["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:9"
    assert "usage" not in event


async def test_what_vllm_refuses_of_token_ids_names_the_parameter(api: Api, upstream: FakeUpstream) -> None:
    upstream.controls[GENERATE] = error(400, "temperature must be non-negative, got -1.0.", "temperature")
    answer = await ask(api, {"token_ids": [5], "sampling_params": {"temperature": -1}}, GENERATE)
    assert refusal(answer) == (400, "sampling_params.temperature", None)
    assert refusal(await ask(api, {"token_ids": [5]}, GENERATE)) == (400, "sampling_params", None)


async def test_what_does_not_exist_for_the_caller_has_one_answer(api: Api, database: Database) -> None:
    save(database, "theirs", tenant=TWO)
    save(database, "training", kind="weights", weights=None)
    save(database, "expired", expires_at=2.0)
    theirs, training = PATH.replace("/a", "/theirs"), f"tinker://{RUN}/weights/training"
    names = ["nobody", theirs, training, PATH.replace("/a", "/expired"), f"{BASE};{theirs}", "tinker://", ADAPTER.name]
    for name in names:
        for answer in (await ask(api, PROMPT | {"model": name}), await api.http.get(f"/v1/models/{name}")):
            assert refusal(answer) == (404, "model", "model_not_found")
            message = f"The model {name!r} does not exist or you do not have access to it."
            assert answer.json()["error"]["message"] == message


async def test_a_base_model_that_the_inference_server_does_not_know_is_not_found(
    api: Api, upstream: FakeUpstream
) -> None:
    upstream.default = error(404, "The model `/secret/path` does not exist.")
    assert refusal(await ask(api, PROMPT)) == (404, "model", "model_not_found")


async def test_a_checkpoint_of_another_base_is_a_400_that_names_the_model(api: Api, database: Database) -> None:
    save(database)
    save(database, "old", base_model="acme/older")
    for name in (f"acme/older;{PATH}", PATH.replace("/a", "/old")):
        assert refusal(await ask(api, PROMPT | {"model": name})) == (400, "model", None)


# Turns and bounds


async def test_requests_of_a_tenant_that_has_waiting_ones_come_after_those_of_another(
    api: Api, upstream: FakeUpstream
) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete)
    mine = [asyncio.create_task(ask(api, PROMPT)) for _ in range(3)]
    await upstream.until(lambda server: server.busy == 3)
    theirs = asyncio.create_task(ask(api, PROMPT, **{"X-API-Key": "tml-two"}))
    await upstream.until(lambda server: server.busy == 4)
    go.set()
    await asyncio.gather(*mine, theirs)
    *own, other = [request.json["priority"] // TENANT_TAGS for request in upstream.completions]
    assert own == sorted(own)
    assert other < own[1]


async def test_a_request_above_the_bounds_of_the_process_is_a_429(serve: Serve, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete)
    async with serve(max_pending_samples=1) as api:
        running = asyncio.create_task(ask(api, PROMPT))
        await upstream.until(lambda server: server.busy == 1)
        answer = await ask(api, PROMPT)
        go.set()
        await running
        assert (await ask(api, PROMPT)).status_code == 200
    assert refusal(answer) == (429, None, "rate_limit_exceeded")
    assert answer.headers["retry-after"] == "1"


async def test_a_quota_of_tokens_holds_a_request_back_until_its_client_goes(
    api: Api, upstream: FakeUpstream, database: Database
) -> None:
    database.write(lambda c: quota_rows.change(c, ONE, {"tokens_per_minute": 60}))
    await api.services.quotas.refresh()
    upstream.default = never
    big = PROMPT | {"max_tokens": 90}
    async with Connection(api, big), Connection(api, big):
        await upstream.until(lambda server: server.busy == 1)
        await until(lambda: bool(api.services.quotas.waiting))
    assert not api.services.quotas.waiting
    assert len(upstream.completions) == 1


async def test_a_tenant_pays_for_no_request_that_has_ended(api: Api, upstream: FakeUpstream) -> None:
    for _ in range(20):
        await ask(api, PROMPT)
    await ask(api, PROMPT, **{"X-API-Key": "tml-two"})
    *_, own, other = [request.json["priority"] // TENANT_TAGS for request in upstream.completions]
    assert abs(other - own) <= 4, "each of the 20 cost at least five"


async def test_a_quota_counts_what_runs_and_what_was_used(api: Api, database: Database) -> None:
    database.write(lambda c: quota_rows.change(c, ONE, {"requests_in_flight": 1, "tokens_per_minute": 100}))
    await api.services.quotas.refresh()
    for _ in range(5):  # each may use 43 tokens, and uses 5
        assert (await ask(api, PROMPT | {"max_tokens": 40})).status_code == 200
    assert api.services.quotas.counts()["paused"] == 0


async def test_the_memory_for_bodies_is_free_while_requests_run(api: Api, upstream: FakeUpstream) -> None:
    """A request may run for minutes. The bodies of two do not fit into this memory together."""
    upstream.default = never
    large = PROMPT | {"prompt": "x" * 70_000}
    async with Connection(api, large) as first, Connection(api, large, first.app) as second:
        (bodies,) = [hook._bodies for hook in second.app.hooks if isinstance(hook, BodyMemoryHook)]
        for received, expanded, _ in bodies._memory.values():
            received._size = expanded._size = 100_000
        await upstream.until(lambda server: server.busy == 2)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
async def test_prompt_logprobs_on_a_gpu_need_a_vllm_that_the_plugin_is_for(
    serve: Serve, database: Database, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(features, "vllm_version", lambda: version)
    save(database)
    async with serve(cuda=True) as api:
        for model in ({}, {"model": PATH}):
            for scores in ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}):
                answer = await ask(api, PROMPT | model | scores)
                if version == "0.32.0":
                    assert answer.status_code == 200, answer.text
                else:
                    assert refusal(answer) == (400, "prompt_logprobs", None)
            assert (await ask(api, PROMPT | model | {"logprobs": 1})).status_code == 200


# Keys and errors of the HTTP table


async def test_a_bearer_key_is_the_key_and_x_api_key_wins(api: Api, database: Database) -> None:
    save(database)
    body = PROMPT | {"model": PATH}
    del api.http.headers["X-API-Key"]
    assert (await ask(api, body, Authorization="Bearer tml-one")).status_code == 200
    assert (await ask(api, body, Authorization="bearer tml-one")).status_code == 200
    assert (await ask(api, body, Authorization="Bearer tml-two")).status_code == 404
    both = {"Authorization": "Bearer tml-two", "X-API-Key": "tml-one"}
    assert (await ask(api, body, **both)).status_code == 200
    assert (await api.post("create_session", {}, Authorization="Bearer tml-one")).status_code == 200
    for wrong in ("", "Bearer", "Basic dG1s", "Bearer "):
        assert refusal(await ask(api, body, Authorization=wrong)) == (401, None, "invalid_api_key")


async def test_a_token_is_made_from_a_bearer_key_and_taken_as_bearer(api: Api) -> None:
    del api.http.headers["X-API-Key"]
    token = (await api.post("auth/token", {}, Authorization="Bearer tml-one")).json()["jwt"]
    assert (await ask(api, PROMPT, Authorization=f"Bearer {token}")).status_code == 200
    refused = await ask(api, PROMPT, Authorization=f"Bearer {token}x")
    assert refusal(refused) == (401, None, "invalid_api_key")
    assert refused.headers["www-authenticate"] == 'Bearer error="invalid_token"'


async def test_errors_that_no_handler_makes_have_openais_shape_too(
    serve: Serve, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(max_body_bytes=2**20) as api:
        assert refusal(await api.http.get("/v1/nowhere")) == (404, None, None)
        assert refusal(await api.http.get("/v1/completions")) == (405, None, None)
        assert refusal(await api.http.post("/v1/completions", content=b"{")) == (400, None, None)
        assert refusal(await api.http.post("/v1/completions", content=b" " * (2**20 + 1))) == (
            413,
            None,
            "request_too_large",
        )
        encoded = await api.http.post("/v1/completions", content=b"{}", headers={"Content-Encoding": "gzip"})
        assert refusal(encoded) == (415, None, None)

        async def fail(*_: object) -> None:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(api.services.checkpoints, "find", fail)
        broken = await ask(api, PROMPT | {"model": PATH})
        assert refusal(broken) == (500, None, None)
        assert "secret" not in broken.text


async def test_a_key_without_the_scope_is_refused_in_openais_shape(serve: Serve, database: Database) -> None:
    text, _ = database.write(lambda c: keys.create(c, tenant=None, name="k", scopes=("train",), expires_at=None))
    async with serve(api_keys="managed") as api:
        refused = await ask(api, PROMPT, **{"X-API-Key": text})
    assert refusal(refused) == (403, None, "insufficient_permissions")


async def test_a_server_that_colocates_says_that_it_serves_no_completions(serve: Serve) -> None:
    async with serve(backend_config={"trainer": {"placement": {"colocate_all": True}}}) as api:
        assert api.services.served[0].openai is None
        refused = await ask(api, PROMPT)
        assert (await api.http.get("/v1/models")).status_code == 200
    assert refusal(refused) == (501, None, None)
