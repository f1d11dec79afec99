"""The protocol of the router's middleware, a base class that hides ASGI, and how the router loads and runs middleware.

A middleware is an ASGI application that is made with the next application: `Plugin(app, router=context)`, the form that
Starlette and slime's router use. `RouterMiddleware` turns it into one method, `handle(request, call_next)`.
`RouterContext` is what the router tells it: options, bounds, workers and tokenizer, also under the names that
middleware written for slime's router reads. Each one is loaded by its import path, and run so that its errors stay its
own. docs/howto/middleware.md is the page for authors."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from skyrl.http.messages import AsgiApp, BodyTooLarge, ClientLeft, Message, Receive, Scope, Send, WatchedSend
from skyrl.router.messages import AppCall, Request, Response, refusal
from skyrl.router.proxy import Truncated
from skyrl.router.worker import Worker

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MAX_BODY_BYTES = 64 * 2**20
_OF_SLIME = frozenset({"_use_url", "_finish_url", "client", "app", "proxy", "workers", "max_weight_version"})
"""What slime's router has besides, for its own use."""


class SlimeArgs(SimpleNamespace):
    """The arguments of slime that the router knows, and the values of `--middleware-options`, as attributes."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"router.args has no {name}: give it to the router, as --middleware-options '{{\"{name}\": ...}}'"
            )


class RouterContext:
    """`tokenizer_dir` is the directory of `--tokenizer`; None if the option was not given. `options` are the values of
    `--middleware-options`, by name. `workers` gives all workers that are registered. `args`: the router's own options
    under slime's names."""

    def __init__(
        self,
        *,
        tokenizer_dir: Path | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        options: dict[str, object] | None = None,
        workers: Callable[[], Sequence[Worker]] = tuple,
        args: Mapping[str, object] | None = None,
    ) -> None:
        self.tokenizer_dir = tokenizer_dir
        self.max_body_bytes = max_body_bytes
        self.options = options or {}
        self._workers = workers
        checkpoint = None if tokenizer_dir is None else str(tokenizer_dir)
        self.args = SlimeArgs(**{"hf_checkpoint": checkpoint, **(args or {}), **self.options})
        self.verbose = False

    @property
    def worker_request_counts(self) -> dict[str, int]:
        """How many requests each worker has in flight, by URL, at this moment."""
        return {worker.url: worker.in_flight for worker in self._workers()}

    @property
    def worker_failure_counts(self) -> dict[str, int]:
        """How many health probes of each worker have failed in a row."""
        return {worker.url: worker.failed_probes for worker in self._workers()}

    @property
    def dead_workers(self) -> set[str]:
        """The URLs of the workers that get no requests now."""
        return {worker.url for worker in self._workers() if not worker.routable}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model (a `tokenizers.Tokenizer`). Raises ValueError when there is none."""
        if self.tokenizer_dir is None:
            raise ValueError("--tokenizer: this middleware needs the directory of the model's tokenizer")
        from tokenizers import Tokenizer

        file = self.tokenizer_dir / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"--tokenizer: {file} does not exist")
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare exceptions
            raise ValueError(f"--tokenizer: {file} cannot be read: {error}") from error

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            why = ": the router chooses a worker and asks it, in call_next" if name in _OF_SLIME else ""
            raise AttributeError(f"router has no {name}{why}; docs/howto/middleware.md lists what it has")


CallNext = Callable[[Request], Awaitable[Response]]
"""Sends the request on and returns the answer. May be called more than once for one request."""


class RouterMiddleware:
    """The base class of what `--middleware` loads, which may also be any class with this `__init__` and `__call__`.
    Override `handle`. State belongs on `self`: one object serves all requests of a router process, on one event
    loop. An exception fails its own request with 500 and is counted; other requests go on."""

    def __init__(self, app: AsgiApp, *, router: RouterContext) -> None:
        self.app = app
        self.router = router

    async def handle(self, request: Request, call_next: CallNext) -> Response:
        return await call_next(request)

    def stats(self) -> Mapping[str, int | float]:
        """Numbers for `GET /statusz`."""
        return {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        async with AsyncExitStack() as calls:

            async def call_next(request: Request) -> Response:
                call = AppCall(self.app, request)
                calls.push_async_callback(call.close)
                return await call.response()

            request = Request(scope, receive, self.router.max_body_bytes)
            response = await self.handle(request, call_next)
            await response.send(send)


logger = logging.getLogger(__name__)

RADIX = "skyrl.router.radix.RadixTreeMiddleware"
ALIASES = {
    "radix": RADIX,
    "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware": RADIX,
}
"""Other names of our own middleware. The second is the path that slime's users give."""


_KEPT = "skyrl.kept_body"
"""Where a scope has the body that one run of a middleware has passed on."""


class PluginError(Exception):
    """A middleware cannot be loaded. The text is for the operator."""


def load(path: str) -> Callable[..., Any]:
    """The class at `package.module.Class`, `package.module:Class` or `file.py:Class`. Raises PluginError."""
    path = ALIASES.get(path, path)
    module_name, colon, name = path.rpartition(":")
    if not colon:
        module_name, _, name = path.rpartition(".")
    if not module_name or not name.isidentifier():
        raise PluginError(f"--middleware: {path!r} is not package.module.Class or file.py:Class")
    try:
        module = _from_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:  # middleware is a program of the user
        if not isinstance(error, ImportError | OSError):
            logger.exception("middleware %s cannot be imported", path)  # the trace says where
        raise PluginError(f"--middleware: {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    plugin = getattr(module, name, None)
    if not callable(plugin):
        raise PluginError(f"--middleware: {module_name} has no class {name!r}")
    return plugin


def _from_file(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"skyrl_middleware_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Guarded:
    """One middleware. An exception that it raises is answered with 500 and counted; other requests go on."""

    def __init__(self, path: str, app: AsgiApp, context: RouterContext) -> None:
        self.path = path
        self.failures = 0
        self.requests = 0
        try:
            self.plugin: Any = made(load(path), app, context)
        except PluginError:
            raise
        except Exception as error:  # middleware is a program of the user
            logger.exception("middleware %s cannot be made", path)
            raise PluginError(f"--middleware: {path!r} cannot be made: {type(error).__name__}: {error}") from error

    def stats(self) -> Mapping[str, Any]:
        own = self.plugin.stats() if callable(getattr(self.plugin, "stats", None)) else {}
        return {"path": self.path, "requests": self.requests, "failures": self.failures, **own}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = WatchedSend(send)
        self.requests += 1
        scope = {name: value for name, value in scope.items() if name != _KEPT}  # of a middleware before this one
        try:
            await self.plugin(scope, receive, sent)
        except (ClientLeft, Truncated):
            raise
        except BodyTooLarge as error:
            message = f"the body is too large for middleware {self.path}"
            if sent.status is not None:
                raise Truncated(message) from error
            await refusal(413, "body_too_large", message).send(send)
        except Exception as error:  # middleware is a program of the user: logged, counted and answered
            self.failures += 1
            logger.exception("middleware %s failed", self.path)
            if sent.status is not None:
                raise Truncated(f"middleware {self.path} failed in the middle of an answer") from error
            message = f"middleware {self.path} failed: {type(error).__name__}: {error}"
            await refusal(500, "middleware_failed", message).send(send)


def made(plugin: Callable[..., Any], app: AsgiApp, context: RouterContext) -> Any:
    """The middleware in front of `app`. Raises what the middleware's class raises."""
    middleware = plugin(app, router=context)
    starlettes = sys.modules.get("starlette.middleware.base")  # if a middleware has imported it
    if starlettes is not None and isinstance(middleware, starlettes.BaseHTTPMiddleware):
        middleware.app = _BodyAgain(middleware.app, context.max_body_bytes)
    return middleware


class _Kept:
    """`whole`: all of the body has come."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.whole = False


class _BodyAgain:
    """The application behind a middleware of Starlette's base class. Its `call_next` gives the body to the application
    once: called again, it would wait until the client leaves. So the body is kept, and given again."""

    def __init__(self, app: AsgiApp, most_bytes: int) -> None:
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kept: _Kept = scope.setdefault(_KEPT, _Kept())
        again = kept.whole

        async def receive_and_keep() -> Message:
            nonlocal again
            if again:
                again = False
                return {"type": "http.request", "body": bytes(kept.body), "more_body": False}
            message = await receive()
            if message["type"] == "http.request" and not kept.whole:
                kept.body += message.get("body", b"")
                kept.whole = not message.get("more_body", False)
            if len(kept.body) > self._most_bytes:
                raise BodyTooLarge(f"body: may have {self._most_bytes} bytes")
            return message

        await self._app(scope, receive_and_keep, send)


class Chain:
    """The middleware in order, and the application behind them. The first sees a request first."""

    def __init__(self, paths: Sequence[str], app: AsgiApp, context: RouterContext) -> None:
        self.guards: list[Guarded] = []
        for path in reversed(paths):
            guard = Guarded(path, app, context)
            self.guards.insert(0, guard)
            app = guard
        self.app = app

    def stats(self) -> list[Mapping[str, Any]]:
        return [guard.stats() for guard in self.guards]
