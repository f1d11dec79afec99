"""Middleware of the router: what it may change, what happens when it fails, and the two examples with the test kit."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import JSONResponse

from skyrl.base.tiny import model_path
from skyrl.router.messages import Request, Response
from skyrl.router.middleware import ALIASES, RADIX, CallNext, PluginError, RouterContext, RouterMiddleware, load
from skyrl.router.testing import MiddlewareBench
from tests.component.router_world import Exchange, FakeWorker, running_router, steps, until, until_left

EXAMPLES = Path(__file__).parents[3] / "examples" / "middleware"
HERE = __name__
HF = model_path()


class Marks(RouterMiddleware):
    """Adds its mark to a list in the body, on the way in, and to a header, on the way out."""

    mark = "?"

    async def handle(self, request: Request, call_next: CallNext) -> Response:
        request.set_json([*await request.json(), self.mark])
        response = await call_next(request)
        response.headers.set("x-marks", (response.headers.get("x-marks") or "") + self.mark)
        return response


class First(Marks):
    mark = "1"


class Second(Marks):
    mark = "2"


class Breaks(RouterMiddleware):
    async def handle(self, request: Request, call_next: CallNext) -> Response:
        if request.path == "/break":
            raise LookupError("on purpose")
        return await call_next(request)


class Moves(RouterMiddleware):
    """Another path, another method, another query."""

    async def handle(self, request: Request, call_next: CallNext) -> Response:
        request.path, request.method, request.query = "/moved", "PUT", b"y=2"
        return await call_next(request)


class Twice(RouterMiddleware):
    """Asks twice, answers with both bodies."""

    async def handle(self, request: Request, call_next: CallNext) -> Response:
        await request.body()
        first = await call_next(request)
        second = await call_next(request)
        return Response.of_json(200, [(await first.body()).decode(), (await second.body()).decode()])


class Pure:
    """A middleware that is plain ASGI, without the base class."""

    def __init__(self, app, *, router) -> None:
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        async def marked(message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-pure", b"yes")]}
            await send(message)

        await self.app(scope, receive, marked)


class LosesTheBody:
    """Plain ASGI whose `receive` fails after the first megabytes of a body."""

    def __init__(self, app, *, router) -> None:
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        size = 0

        async def failing():
            nonlocal size
            if size > 2 * 2**20:
                raise LookupError("on purpose")
            message = await receive()
            size += len(message.get("body", b""))
            return message

        await self.app(scope, failing, send)


class Upper(RouterMiddleware):
    """Changes a stream while it passes."""

    async def handle(self, request: Request, call_next: CallNext) -> Response:
        response = await call_next(request)
        chunks = response.chunks()

        async def upper():
            async for chunk in chunks:
                yield chunk.upper()

        response.set_chunks(upper())
        return response


class OfSlime(BaseHTTPMiddleware):
    """Built as those that slime's router of March 2026 loads, and reads of the router what these read."""

    def __init__(self, app, *, router) -> None:
        super().__init__(app)
        self.router = router
        self.args = router.args
        self.most = self.args.most_at_a_worker
        self.router.trajectories = self  # slime's keeps its cache there

    async def dispatch(self, request, call_next):
        if request.url.path != "/generate":
            return await call_next(request)
        body = await request.json()
        counts = {url: n for url, n in self.router.worker_request_counts.items() if url not in self.router.dead_workers}
        if min(counts.values()) >= self.most:
            return JSONResponse({"busy": counts, "failed": self.router.worker_failure_counts}, status_code=429)
        answer = {}
        for _ in range(5):
            response: Any = await call_next(request)
            answer = json.loads(b"".join([chunk async for chunk in response.body_iterator]))
            if answer["meta_info"]["finish_reason"]["type"] != "abort":
                break
        if getattr(self.router, "verbose", False):
            print(answer)
        return JSONResponse(answer | {"asked": body, "checkpoint": self.args.hf_checkpoint})


@pytest.mark.parametrize(
    ("chain", "path", "sent", "expected", "header", "lines", "bodies"),
    [
        ((".First", ":Second"), "/x", b"[0]", b'[0,"1","2"]', ("x-marks", "21"), ["/x"], [b'[0,"1","2"]']),
        ((".Moves",), "/from?x=1", b"1", b"1", None, ["/moved?y=2"], [b"1"]),
        ((".Twice",), "/x", b"same", b'["same","same"]', None, ["/x", "/x"], [b"same", b"same"]),
        ((".Pure",), "/x", b"1", b"1", ("x-pure", "yes"), ["/x"], [b"1"]),
    ],
)
async def test_what_middleware_changes_reaches_worker_and_client(
    chain: tuple[str, ...],
    path: str,
    sent: bytes,
    expected: bytes,
    header: tuple[str, str] | None,
    lines: list[str],
    bodies: list[bytes],
) -> None:
    worker = FakeWorker()
    async with (
        running_router(worker, middleware=tuple(HERE + name for name in chain)) as router,
        router.session.post(router.url + path, data=sent) as answer,
    ):
        assert (answer.status, await answer.read()) == (200, expected)
        assert header is None or answer.headers[header[0]] == header[1]
    method = "PUT" if ".Moves" in chain else "POST"
    assert [request.line for request in worker.received] == [f"{method} {line} HTTP/1.1" for line in lines]
    assert [request.body for request in worker.received] == bodies
    assert worker.received[0].header("content-length") == [str(len(bodies[0]))]


async def test_middleware_that_raises_fails_its_own_request_alone_and_is_counted() -> None:
    async with running_router(FakeWorker(), middleware=(f"{HERE}.Breaks",)) as router:
        async with router.session.post(f"{router.url}/break", data=b"1") as answer:
            assert answer.status == 500
            assert "LookupError: on purpose" in (await answer.json())["error"]["message"]
        async with router.session.post(f"{router.url}/x", data=b"1") as answer:
            assert (answer.status, await answer.read()) == (200, b"1")
        (stats,) = router.app.status()["middleware"]  # type: ignore[misc]
        assert (stats["requests"], stats["failures"]) == (2, 1)


async def test_a_body_that_a_middleware_loses_ends_the_request() -> None:
    async with (
        running_router(FakeWorker(), middleware=(f"{HERE}.LosesTheBody",)) as router,
        router.session.post(f"{router.url}/x", data=io.BytesIO(bytes(4 * 2**20))) as answer,
    ):
        assert answer.status == 502
        assert "could not be read" in (await answer.json())["error"]["message"]


class Replaces(RouterMiddleware):
    """Gives each call a body of its own."""

    calls = 0

    async def handle(self, request: Request, call_next: CallNext) -> Response:
        Replaces.calls += 1
        request.set_body(b"%d" % Replaces.calls)
        return await call_next(request)


class Passes(BaseHTTPMiddleware):
    """Starlette's, with Starlette's `__init__` but for the router."""

    def __init__(self, app, *, router) -> None:
        super().__init__(app)

    async def dispatch(self, request, call_next):
        return await call_next(request)


class TwiceOfStarlette(Passes):
    async def dispatch(self, request, call_next):
        await request.body()
        answers = []
        for _ in range(2):
            response: Any = await call_next(request)
            answers.append(b"".join([chunk async for chunk in response.body_iterator]).decode())
        return JSONResponse(answers)


async def test_a_second_call_of_starlettes_middleware_has_the_body_that_the_middleware_behind_it_gives() -> None:
    for chain, asked in (
        (("TwiceOfStarlette", "Passes"), [b"same"] * 2),
        (("TwiceOfStarlette", "Replaces", "Passes"), [b"1", b"2"]),
    ):
        paths = tuple(f"{HERE}.{name}" for name in chain)
        async with (
            running_router(worker := FakeWorker(), middleware=paths) as router,
            router.session.post(f"{router.url}/x", data=b"same") as answer,
        ):
            assert await answer.json() == [one.decode() for one in asked]
        assert [one.body for one in worker.received] == asked


async def test_middleware_written_for_slimes_router_reads_its_arguments_and_the_workers_counts() -> None:
    held, ends = asyncio.Event(), ["abort", "abort", "stop"]

    async def worker(exchange: Exchange) -> None:
        if exchange.request.path == "/slow":
            await held.wait()
        kind = ends.pop(0) if ends else "length"
        await exchange.answer(json.dumps({"text": "a", "meta_info": {"finish_reason": {"type": kind}}}).encode())

    first, second = FakeWorker(worker), FakeWorker(worker)
    options = {"middleware": (f"{HERE}.OfSlime",), "middleware_options": {"most_at_a_worker": 1}, "tokenizer": HF}
    async with running_router(first, second, **options) as router:
        async with router.session.post(f"{router.url}/generate", json={"text": "b"}) as answer:
            found = await answer.json()
        assert (found["meta_info"]["finish_reason"], ends) == ({"type": "stop"}, [])
        assert (found["asked"], found["checkpoint"]) == ({"text": "b"}, str(HF))
        bodies = [one.body for one in [*first.received, *second.received] if one.path == "/generate"]
        assert bodies == [b'{"text": "b"}'] * 3
        slow = [asyncio.create_task(router.session.post(f"{router.url}/slow").__aenter__()) for _ in range(2)]
        await until(lambda: sum(one["in_flight"] for one in router.app.status()["workers"]) == 2)  # type: ignore
        async with router.session.post(f"{router.url}/generate", json={"text": "b"}) as answer:
            busy = {"busy": {first.url: 1, second.url: 1}, "failed": {first.url: 0, second.url: 0}}
            assert (answer.status, await answer.json()) == (429, busy)
        held.set()
        for one in await asyncio.gather(*slow):
            assert one.status == 200
            one.release()


def test_what_slimes_middleware_cannot_have_is_told_with_what_to_do() -> None:
    context = RouterContext(options={"partial_rollout": False}, args={"sglang_router_port": 3000})
    assert (context.args.partial_rollout, context.args.sglang_router_port) == (False, 3000)
    assert context.args.hf_checkpoint is None
    with pytest.raises(AttributeError, match=r"router\.args has no n_samples.*--middleware-options '\{\"n_samples\": "):
        _ = context.args.n_samples  # type: ignore[attr-defined]
    for name in ("_use_url", "_finish_url", "client"):
        with pytest.raises(AttributeError, match=f"router has no {name}: the router chooses a worker.*in call_next"):
            getattr(context, name)
    assert not hasattr(context, "anything")
    assert getattr(context.args, "slime_router_timeout", None) is None


async def test_a_stream_passes_middleware_piece_by_piece() -> None:
    go_on = asyncio.Event()
    stream = steps(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n", go_on, b"3\r\ntwo\r\n0\r\n\r\n"
    )
    async with (
        running_router(FakeWorker(stream), middleware=(f"{HERE}.Upper",)) as router,
        router.session.post(f"{router.url}/x", data=b"1") as answer,
    ):
        assert await answer.content.readany() == b"ONE"
        go_on.set()
        assert await answer.content.read() == b"TWO"


@pytest.mark.parametrize("chain", [(f"{HERE}.First",), (f"{HERE}.First", f"{HERE}.Pure")])
async def test_a_client_that_leaves_frees_the_worker_behind_middleware(chain: tuple[str, ...]) -> None:
    freed = asyncio.Event()
    worker = FakeWorker(steps(until_left, freed.set))
    async with running_router(worker, middleware=chain) as router:
        asking = asyncio.create_task(router.session.post(f"{router.url}/generate", data=b"[]").__aenter__())
        await until(lambda: len(worker.received) == 1)
        asking.cancel()
        await freed.wait()
        await until(lambda: router.app.status()["workers"][0]["in_flight"] == 0)  # type: ignore[index]
        assert router.app.status()["middleware"][0]["failures"] == 0, "leaving is no failure of the middleware"  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere.Class", "cannot be imported"),
        ("json.Nothing", "has no class 'Nothing'"),
        ("Class", "is not package.module.Class"),
        ("/no/such/file.py:Class", "does not exist"),
    ],
)
def test_middleware_that_cannot_be_loaded_is_an_error_that_names_it(path: str, words: str) -> None:
    with pytest.raises(PluginError, match=words):
        load(path)


def test_slimes_path_of_the_radix_cache_is_ours() -> None:
    path = "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware"
    assert ALIASES[path] == RADIX
    assert load(path) is load("radix")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_the_example_that_caps_tokens() -> None:
    async def worker(request: Request) -> Response:
        return Response.of_json(200, await request.json())

    bench = MiddlewareBench(example("cap_tokens").CapTokens, worker, options={"cap_tokens": 100})
    capped = await bench.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 101, "top_p": 0.5}})
    assert await capped.json() == {"text": "a", "sampling_params": {"max_new_tokens": 100, "top_p": 0.5}}
    assert capped.headers.get("x-capped-tokens") == "100"
    free = await bench.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 100}})
    assert free.headers.get("x-capped-tokens") is None
    assert bench.plugin.stats() == {"capped": 1}


async def test_the_test_kit_gives_starlettes_middleware_the_body_again() -> None:
    async def worker(request: Request) -> Response:
        return Response.of_json(200, await request.json())

    bench = MiddlewareBench(TwiceOfStarlette, worker)
    assert await (await bench.post("/x", 7)).json() == ["7", "7"]


async def test_the_example_that_asks_again() -> None:
    answers = [{"text": ""}, {"text": "here"}, {"text": "never asked"}]

    async def worker(request: Request) -> Response:
        return Response.of_json(200, answers[len(bench.received) - 1])

    bench = MiddlewareBench(example("ask_again").AskAgain, worker)
    answer = await bench.post("/generate", {"text": "hello"})
    assert await answer.json() == {"text": "here"}
    assert [json.loads(await request.body()) for request in bench.received] == [{"text": "hello"}] * 2
    assert bench.plugin.stats() == {"asked_again": 1}
