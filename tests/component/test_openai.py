"""OpenAI requests through a whole API process: which server answers, failures before and after the first byte, and the
bounds, turns and counts that hold for samples, too. The upstream on a real socket answers as each test tells it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from api_harness import BASE, LONG_S, Api, Serve
from fake_upstream import FakeUpstream, Received, Reply, after, error, hang_up, never, reply
from sqlalchemy import delete, insert, select, update

import skyrl.api.server
from skyrl.api.app import create_app
from skyrl.api.tokens import tenant_of_key
from skyrl.db import adapter_uses, adapter_versions
from skyrl.db import quotas as quota_rows
from skyrl.db.checkpoints import checkpoints
from skyrl.db.columns import lora_values
from skyrl.db.database import Database
from skyrl.db.engine_state import publish_url
from skyrl.db.futures import futures
from skyrl.db.usage import UsageKind, usage
from skyrl.types.lora import LoraSpec
from skyrl.types.weights import AdapterVersion

ONE, TWO = tenant_of_key("tml-one"), tenant_of_key("tml-two")
RUN = "s1:train:0"
PATH = f"tinker://{RUN}/sampler_weights/a"
ADAPTER = AdapterVersion.of(RUN, 3)
PROMPT = {"model": BASE, "prompt": [5, 6, 7], "max_tokens": 4}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


def save(database: Database, name: str = "a", **changes: Any) -> None:
    row = {
        "tenant": ONE,
        "model_id": RUN,
        "kind": "sampler_weights",
        "name": name,
        "store_key": "k/a",
        "weights": ADAPTER,
        "base_model": BASE,
        "size_bytes": 1,
        "public": False,
        "created_at": 1.0,
    }
    row |= lora_values(LoraSpec(8, 32.0, 1, True, True, True)) | changes
    database.write(lambda c: c.execute(insert(checkpoints), row))


def answer_of(request: Received, finish: str = "stop") -> dict[str, Any]:
    """As vLLM answers: with its own name for the model, and fields that callers must not see."""
    choice = {"index": 0, "text": "hi", "finish_reason": finish}
    own = {"kv_transfer_params": {"host": "secret"}, "metrics": {"x": 1}}
    return {"id": "cmpl-1", "model": request.json["model"], "choices": [choice], "usage": USAGE} | own


async def complete(request: Received, writer: asyncio.StreamWriter) -> None:
    await reply(200, answer_of(request))(request, writer)


def events(
    *data: Any, then: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None, done: bool = True
) -> Reply:
    """A stream in vLLM's form, whose last events are DONE unless `done` is false; then `then` runs."""

    async def send(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n")
        for each in data:
            text = json.dumps({"id": "cmpl-1", "model": request.json["model"]} | each if "error" not in each else each)
            writer.write(f"data: {text}\n\n".encode())
        if done:
            writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        if then is not None:
            await then(writer)
        writer.close()

    return send


def piece(text: str, tokens: int, finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


TOTAL = {"choices": [], "usage": USAGE}
DEAD = {"error": {"message": "EngineCore is dead at /some/path", "type": "InternalServerError", "code": 500}}


@pytest.fixture(autouse=True)
def answers(upstream: FakeUpstream) -> None:
    upstream.default = complete


async def ask(api: Api, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> httpx.Response:
    return await api.http.post(path, json=body, headers=headers)


def data_of(answer: httpx.Response) -> list[Any]:
    """The data of the events of a stream."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("\n\n")
    frames = [frame.removeprefix("data: ") for frame in answer.text.split("\n\n")[:-1]]
    return [frame if frame == "[DONE]" else json.loads(frame) for frame in frames]


def refusal(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    body = answer.json()
    assert body.keys() == {"error"}, body
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return answer.status_code, body["error"]["param"], body["error"]["code"]


def used(database: Database) -> dict[tuple[str, str, str], float]:
    """(tenant, session, kind) → amount."""
    query = select(usage.c.tenant, usage.c.session_id, usage.c.kind, usage.c.amount)
    return {
        (row.tenant, row.session_id, row.kind): row.amount for row in database.read(lambda c: list(c.execute(query)))
    }


async def counted(api: Api, database: Database) -> dict[str, float]:
    await api.services.sampling._forwarded._usage.flush()
    return {
        kind: amount for (tenant, session, kind), amount in used(database).items() if (tenant, session) == (ONE, "")
    }


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
    assert sent.headers["x-request-id"] == "mine-1"
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
    listed = (await api.http.get(f"{prefix}/models")).json()
    assert [model["id"] for model in listed["data"]] == [BASE, PATH]
    assert not upstream.requests
    public = PATH.replace("/a", "/public")
    for name in (BASE, PATH, public):
        assert (await api.http.get(f"{prefix}/models/{name}")).json()["id"] == name
    answer = await ask(api, PROMPT | {"model": public}, f"{prefix}/completions")
    assert answer.json()["model"] == public


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


async def test_a_checkpoint_of_another_base_is_a_400_that_names_the_model(api: Api, database: Database) -> None:
    save(database)
    save(database, "old", base_model="acme/older")
    for name in (f"acme/older;{PATH}", PATH.replace("/a", "/old")):
        assert refusal(await ask(api, PROMPT | {"model": name})) == (400, "model", None)


async def test_a_checkpoint_is_not_served_after_its_deletion(api: Api, database: Database) -> None:
    save(database)
    assert (await ask(api, PROMPT | {"model": PATH})).status_code == 200
    database.write(lambda c: c.execute(delete(checkpoints)))
    assert refusal(await ask(api, PROMPT | {"model": PATH})) == (404, "model", "model_not_found")


# Failures before the first byte: the request is sent again


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_that_the_server_has_lost_is_loaded_again(
    api: Api, upstream: FakeUpstream, database: Database, stream: bool
) -> None:
    save(database)
    upstream.adapters = set()
    upstream.default = events(piece("hi", 1, "stop")) if stream else complete
    (api.services.config.state_dir / "adapters").mkdir()
    directory = api.services.config.state_dir / "adapters" / RUN.replace(":", "=3A") / "v000003"
    directory.mkdir(parents=True)
    assert (await ask(api, PROMPT | {"model": PATH, "stream": stream})).status_code == 200
    assert [load.json for load in upstream.loads] == [{"lora_name": ADAPTER.name, "lora_path": str(directory)}]


@pytest.mark.parametrize("fault", [hang_up, error(503, "starting"), reply(500, "x")], ids=["gone", "503", "500"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_the_server_is_not_seen_by_the_caller(
    api: Api, upstream: FakeUpstream, stream: bool, fault: Reply
) -> None:
    upstream.script.append(fault)
    upstream.default = events(piece("hi", 1, "stop")) if stream else complete
    answer = await ask(api, PROMPT | {"stream": stream})
    assert answer.status_code == 200
    assert len(upstream.completions) == 2


@pytest.mark.parametrize("first", [events(done=False), events(DEAD)], ids=["no event", "an error"])
async def test_a_stream_that_dies_before_its_first_event_begins_again(
    api: Api, upstream: FakeUpstream, first: Reply
) -> None:
    upstream.script.append(first)
    upstream.default = events(piece("hi", 1, "stop"))
    assert [e["choices"][0]["text"] for e in data_of(await ask(api, PROMPT | {"stream": True}))[:-1]] == ["hi"]


async def test_an_aborted_answer_is_asked_for_again(api: Api, upstream: FakeUpstream) -> None:
    async def abort(request: Received, writer: asyncio.StreamWriter) -> None:
        await reply(200, answer_of(request, "abort"))(request, writer)

    upstream.script.append(abort)
    assert (await ask(api, PROMPT)).json()["choices"][0]["finish_reason"] == "stop"


async def test_a_failure_that_stays_is_a_503_that_tells_nothing_of_the_server(
    serve: Serve, upstream: FakeUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.default = error(503, "no GPU at /secret/path")
    async with serve(forwarding_deadline_s=0.2) as api:
        answer = await ask(api, PROMPT, **{"X-Request-Id": "find-me"})
    assert refusal(answer) == (503, None, "inference_failed")
    assert answer.headers["x-should-retry"] == "false"
    assert "secret" not in answer.text
    assert "find-me" in answer.text
    assert "/secret/path" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_the_server_reaches_the_caller_under_the_callers_names(
    api: Api, upstream: FakeUpstream, database: Database, stream: bool
) -> None:
    save(database)
    sentence = "This model's maximum context length is 100 tokens."
    upstream.default = error(400, f"{sentence} ({ADAPTER.name})", "input_tokens")
    answer = await ask(api, PROMPT | {"model": PATH, "stream": stream})
    assert refusal(answer) == (400, "input_tokens", "context_length_exceeded")
    assert answer.json()["error"]["message"] == f"{sentence} ({PATH})"
    assert len(upstream.completions) == 1


# Failures after the first event


@pytest.mark.parametrize(
    "rest",
    [
        events(piece("a", 1), done=False),
        events(piece("a", 1), DEAD),
        events(piece("a", 1), piece("", 1, "abort")),
        events(piece("a", 1), {"choices": "?"}),
    ],
    ids=["broken off", "an error", "aborted", "nonsense"],
)
async def test_a_stream_that_breaks_off_ends_with_an_error_and_without_done(
    api: Api, upstream: FakeUpstream, database: Database, rest: Reply
) -> None:
    upstream.default = rest
    first, last = data_of(await ask(api, PROMPT | {"stream": True}))
    assert first["choices"][0]["text"] == "a"
    assert last["error"]["code"] == "inference_failed"
    assert "/some/path" not in json.dumps(last)
    assert len(upstream.completions) == 1
    assert await counted(api, database) == {UsageKind.PREFILL: 3.0, UsageKind.SAMPLE: 1.0}


# Usage


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"continuous_usage_stats": True}])
async def test_a_stream_has_the_usage_that_the_caller_asked_for(
    api: Api, upstream: FakeUpstream, database: Database, options: Any
) -> None:
    upstream.default = events(piece("a", 1), piece("b", 2, "stop"), TOTAL)
    body = PROMPT | {"stream": True} | ({"stream_options": options} if options else {})
    *got, done = data_of(await ask(api, body))
    assert done == "[DONE]"
    numbers = [event.get("usage", {}).get("completion_tokens") for event in got]
    assert (
        numbers
        == {None: [None, None], "include_usage": [None, None, 2], "continuous_usage_stats": [1, 2]}[
            next(iter(options)) if options else None
        ]
    )
    (sent,) = upstream.completions
    assert sent.json["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert await counted(api, database) == {
        UsageKind.PREFILL: 2.0,
        UsageKind.PREFILL_CACHED: 1.0,
        UsageKind.SAMPLE: 2.0,
    }


async def test_a_whole_answer_is_counted_for_its_tenant(api: Api, database: Database) -> None:
    await ask(api, PROMPT)
    await ask(api, PROMPT, **{"X-API-Key": "tml-two"})
    expected = {UsageKind.PREFILL: 2.0, UsageKind.PREFILL_CACHED: 1.0, UsageKind.SAMPLE: 2.0}
    assert await counted(api, database) == expected
    assert used(database) == {(tenant, "", kind): n for tenant in (ONE, TWO) for kind, n in expected.items()}


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
    *own, other = [request.json["priority"] for request in upstream.completions]
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
        async with asyncio.timeout(LONG_S):
            while not api.services.quotas.waiting:
                await asyncio.sleep(0)
    assert not api.services.quotas.waiting
    assert len(upstream.completions) == 1


# Clients that go


class Connection:
    """A request over an ASGI connection, which the client closes when the block ends."""

    def __init__(self, api: Api, body: dict[str, Any]) -> None:
        self._app = create_app(api.services)
        self._body = json.dumps(body).encode()
        self._closed = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.began = asyncio.Event()

    async def __aenter__(self) -> Connection:
        headers = [(b"x-api-key", b"tml-one"), (b"content-length", str(len(self._body)).encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        messages = iter([{"type": "http.request", "body": self._body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            if (message := next(messages, None)) is not None:
                return message
            await self._closed.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)
            if message.get("body"):
                self.began.set()

        self._task = asyncio.create_task(self._app(scope, receive, send))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed.set()
        async with asyncio.timeout(LONG_S):
            await self._task


@pytest.mark.parametrize("stream", [False, True])
async def test_the_server_is_free_at_once_when_the_client_goes(api: Api, upstream: FakeUpstream, stream: bool) -> None:
    upstream.default = never
    async with Connection(api, PROMPT | {"stream": stream}):
        await upstream.until(lambda server: server.busy == 1)
    await upstream.until(lambda server: server.busy == 0)
    assert upstream.disconnects == 1
    assert len(api.services.openai_in_flight) == 0


async def test_the_server_is_free_at_once_when_the_client_goes_in_mid_stream(
    api: Api, upstream: FakeUpstream, database: Database
) -> None:
    async def wait(_: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    upstream.default = events(piece("a", 1), done=False, then=wait)
    async with Connection(api, PROMPT | {"stream": True}) as connection:
        await connection.began.wait()
    await upstream.until(lambda server: server.busy == 0)
    assert upstream.disconnects == 1
    assert await counted(api, database) == {UsageKind.PREFILL: 3.0, UsageKind.SAMPLE: 1.0}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_process_that_ends_tells_the_clients_of_running_requests(
    serve: Serve, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def wait(_: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(skyrl.api.server, "DRAIN_S", 0.05)
    upstream.default = events(piece("a", 1), done=False, then=wait) if stream else never
    async with serve() as api, Connection(api, PROMPT | {"stream": stream}) as connection:
        if stream:
            await connection.began.wait()
        else:
            await upstream.until(lambda server: server.busy == 1)
        await skyrl.api.server.drain(api.services)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONG_S):
                await asyncio.shield(connection._task)
        sent = connection.sent
        assert refusal(await ask(api, PROMPT)) == (503, None, None)
    assert sent[0]["status"] == (200 if stream else 503)
    assert b"the server is stopping" in sent[-1]["body"]
    assert b"[DONE]" not in sent[-1]["body"]


# Adapters in use


def held(database: Database) -> bool:
    return ADAPTER in database.read(lambda c: adapter_versions.held(c, adapter_uses.time.time()))


async def test_an_adapter_stays_while_a_request_runs_although_its_checkpoint_was_deleted(
    api: Api, upstream: FakeUpstream, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(database)
    go = asyncio.Event()
    upstream.default = after(go, complete)
    running = asyncio.create_task(ask(api, PROMPT | {"model": PATH}))
    await upstream.until(lambda server: server.busy == 1)
    database.write(lambda c: c.execute(delete(checkpoints)))
    assert held(database)
    passed = adapter_uses.RENEW_BEFORE_S + 1
    database.write(
        lambda c: c.execute(update(adapter_uses.uses).values(used_until=adapter_uses.uses.c.used_until - passed))
    )
    monkeypatch.setattr(adapter_uses, "time", Later(passed))
    await api.services.adapter_uses.renew()
    (row,) = database.read(lambda c: list(c.execute(select(adapter_uses.uses))))
    assert row.used_until > adapter_uses.time.time() + adapter_uses.RENEW_BEFORE_S
    go.set()
    assert (await running).status_code == 200
    monkeypatch.setattr(adapter_uses, "time", Later(passed + adapter_uses.HOLD_S + 1))
    await api.services.adapter_uses.renew()
    assert not held(database)


class Later:
    """The module `time`, some seconds later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def time(self) -> float:
        import time

        return time.time() + self._seconds


async def test_requests_for_one_adapter_write_one_row_in_minutes(api: Api, database: Database) -> None:
    save(database)
    writes = 0
    real = api.services.adapter_uses._writer.transact

    async def counting(change: Any) -> Any:
        nonlocal writes
        writes += 1
        return await real(change)

    api.services.adapter_uses._writer = type("Writer", (), {"transact": staticmethod(counting)})()  # type: ignore[assignment]
    for _ in range(5):
        await ask(api, PROMPT | {"model": PATH})
    await ask(api, PROMPT)
    assert writes == 1


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
    from skyrl.db import keys

    text, _ = database.write(lambda c: keys.create(c, tenant=None, name="k", scopes=("train",), expires_at=None))
    async with serve(api_keys="managed") as api:
        refused = await ask(api, PROMPT, **{"X-API-Key": text})
    assert refusal(refused) == (403, None, "insufficient_permissions")


async def test_a_server_that_colocates_says_that_it_serves_no_completions(serve: Serve) -> None:
    async with serve(backend_config={"trainer": {"placement": {"colocate_all": True}}}) as api:
        assert api.services.openai is None
        refused = await ask(api, PROMPT)
        assert (await api.http.get("/v1/models")).status_code == 200
    assert refusal(refused) == (501, None, None)


async def test_requests_wait_for_the_engine_to_publish(api: Api, upstream: FakeUpstream, database: Database) -> None:
    database.write(lambda c: publish_url(c, None))
    running = asyncio.create_task(ask(api, PROMPT))
    async with asyncio.timeout(LONG_S):
        while not len(api.services.openai_in_flight):
            await asyncio.sleep(0)
    database.write(lambda c: publish_url(c, upstream.url))
    assert (await running).status_code == 200
