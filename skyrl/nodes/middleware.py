"""ASGI middleware in vLLM's API server: loads adapters that a request names by a reference to the checkpoint store.

vLLM adds it by `--middleware`. It brings the files to this node, and passes the request on with their directory. Other
requests pass unchanged. The middleware is outside of vLLM's own check of the API key, so it checks the key before it
fetches anything; a request without the key goes to vLLM, which refuses it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from skyrl.nodes.cache import SCRATCH, NodeCache
from skyrl.nodes.daemons import Daemons
from skyrl.nodes.references import NOT_STORED, STORE_AWAY, is_reference, key_in
from skyrl.nodes.settings import NodeSettings
from skyrl.storage.base import NotStored, StoreError
from skyrl.storage.registry import store_at

logger = logging.getLogger(__name__)

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_BODY = 2**16
FETCHES_AT_ONCE, LINKS_AT_ONCE = 8, 4
GRACE_S = 60.0
"""The time between unloading an adapter and deleting its files: a request that still runs may make vLLM read them."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class StoredAdapterLoads:
    """`settings` come from the environment. Raises ValueError if they are missing, and StoreError for a store that
    cannot be used."""

    def __init__(self, app: App, settings: NodeSettings | None = None, grace_s: float = GRACE_S) -> None:
        settings = settings or NodeSettings.from_environment()
        store = store_at(settings.store, settings.store_options, settings.cache / SCRATCH)
        self._app = app
        self._key_hash = _hash(settings.api_key)
        self._grace_s = grace_s
        self._cache = NodeCache(store, settings.cache, settings.cache_bytes)
        self._fetches, self._links = Daemons(FETCHES_AT_ONCE), Daemons(LINKS_AT_ONCE)
        self._opening: asyncio.Task[OSError | None] | None = None
        self._bringing: dict[str, asyncio.Task[Path]] = {}
        self._loaded: dict[str, str] = {}
        """By name of a loaded adapter, the key of its files."""
        self._used: Counter[str] = Counter()
        """By key, how many requests load it now, or have ended without an answer."""
        self._unused_at: dict[str, float] = {}
        """By key of files that vLLM does not read, when its files may be deleted (`time.monotonic`)."""
        self._releasing: dict[str, asyncio.Task[None]] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._opening = asyncio.create_task(self._open())
        if self._unused_at:
            self._release_unused()
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else None
        if path not in (LOAD, UNLOAD) or not self._has_key(scope):
            await self._app(scope, receive, send)
            return
        body = await _body_of(receive)
        if body is None:
            await _answer(send, 413, "BadRequestError", f"the body has more than {MAX_BODY} bytes")
        elif path == LOAD:
            await self._load(scope, body, receive, send)
        else:
            await self._unload(scope, body, receive, send)

    async def _load(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        request = _fields_of(body)
        reference = request.get("lora_path")
        if not isinstance(reference, str) or not is_reference(reference):
            await self._app(scope, _replayed(body, receive), send)
            return
        key = key_in(reference)
        if key is None:
            await _answer(send, 400, "BadRequestError", f"lora_path: {reference!r} names no adapter in the store")
            return
        self._used[key] += 1
        try:
            directory = await self._bring(key)
        except (StoreError, OSError) as error:
            self._used[key] -= 1
            await self._refuse(key, error, send)
            return
        local = json.dumps(request | {"lora_path": str(directory)}).encode()
        status = await self._status_of(_with_length(scope, len(local)), _replayed(local, receive), send)
        if status == 200:
            self._loaded[str(request.get("lora_name"))] = key
        if status is not None:  # else vLLM may have loaded the adapter all the same: the files stay
            self._used[key] -= 1
            self._note_unused(key)

    async def _refuse(self, key: str, error: StoreError | OSError, send: Send) -> None:
        if isinstance(error, NotStored):
            await _answer(send, 404, NOT_STORED, f"the checkpoint store has no adapter {key}")
            return
        self._opening = None  # somebody may have deleted the cache
        logger.warning("adapter %s could not be brought to this node: %s: %s", key, type(error).__name__, error)
        await _answer(send, 503, STORE_AWAY, f"adapter {key} cannot be brought to this node now")

    async def _unload(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        status = await self._status_of(scope, _replayed(body, receive), send)
        key = self._loaded.pop(str(_fields_of(body).get("lora_name")), None) if status == 200 else None
        if key is not None:
            self._note_unused(key)

    def _note_unused(self, key: str) -> None:
        """Delete the files of a key later, unless vLLM may read them."""
        if not self._is_used(key):
            self._unused_at[key] = time.monotonic() + self._grace_s

    def _is_used(self, key: str) -> bool:
        return self._used[key] > 0 or key in self._loaded.values()

    async def _bring(self, key: str) -> Path:
        """This vLLM's directory of an adapter. All requests for the same adapter wait for one fetch, which goes on if a
        client gives up."""
        self._unused_at.pop(key, None)
        task = self._bringing.get(key)
        if task is None:
            task = self._bringing[key] = asyncio.create_task(self._cached_or_fetched(key))
            task.add_done_callback(lambda ended: self._brought(key, ended))
        return await asyncio.shield(task)

    def _brought(self, key: str, task: asyncio.Task[Path]) -> None:
        del self._bringing[key]
        if not task.cancelled():
            task.exception()  # it may be that no client waits any more

    async def _cached_or_fetched(self, key: str) -> Path:
        if (release := self._releasing.get(key)) is not None:
            await asyncio.wait([release])
        await self._opened()
        directory = await self._links.run(lambda: self._cache.cached(key))
        return directory or await self._fetches.run(lambda: self._cache.fetch(key))

    async def _opened(self) -> None:
        """Return when the cache is open. Raises OSError if it cannot be opened; the next call tries again."""
        if self._opening is None or (self._opening.done() and self._opening.result() is not None):
            self._opening = asyncio.create_task(self._open())
        if (error := await asyncio.shield(self._opening)) is not None:
            raise error

    async def _open(self) -> OSError | None:
        try:
            await self._links.run(self._cache.open)
        except OSError as error:
            logger.warning("the directory for adapters cannot be used: %s", error)
            return error
        return None

    def _release_unused(self) -> None:
        """Begin to delete the files of adapters that were unloaded long enough ago."""
        now = time.monotonic()
        for key in [key for key, at in self._unused_at.items() if at <= now and key not in self._releasing]:
            del self._unused_at[key]
            if not self._is_used(key):
                del self._used[key]
                task = self._releasing[key] = asyncio.create_task(self._release(key))
                task.add_done_callback(lambda _, key=key: self._releasing.pop(key))

    async def _release(self, key: str) -> None:
        try:
            await self._links.run(lambda: self._cache.release(key))
        except OSError as error:
            logger.warning("the files of adapter %s could not be deleted from this node: %s", key, error)

    async def _status_of(self, scope: Message, receive: Receive, send: Send) -> int | None:
        """Pass a request on. The status of its answer; None if there is none."""
        status: int | None = None

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self._app(scope, receive, noting)
        return status

    def _has_key(self, scope: Message) -> bool:
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        scheme, _, key = given.decode("latin-1").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(_hash(key), self._key_hash)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _fields_of(body: bytes) -> dict[str, Any]:
    """The fields of a JSON object; none for another body, which vLLM refuses."""
    try:
        fields = json.loads(body)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


async def _body_of(receive: Receive) -> bytes | None:
    """The whole body; None if it is too long. What a client has sent that went away is left to vLLM."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            return None
        if not message.get("more_body", False):
            return body


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, and then what the server gives."""
    waiting = [body]

    async def replayed() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replayed


def _with_length(scope: Message, length: int) -> Message:
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


async def _answer(send: Send, status: int, kind: str, message: str) -> None:
    """An error in vLLM's form."""
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
