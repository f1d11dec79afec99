"""ASGI middleware in vLLM's API server: loads adapters that a request names by a reference to the checkpoint store.

vLLM adds it by `--middleware`. It brings the files to this node, from the store or out of the request itself
(`hand_over`), and passes the request on with their directory. Other requests pass unchanged. The middleware is outside
of vLLM's own check of the API key, so it checks the key before it reads or fetches anything; a request without the key
goes to vLLM, which refuses it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from skyrl.http.answers import content_type_of
from skyrl.http.messages import (
    JSON,
    AsgiApp,
    Body,
    BodyTooLarge,
    ClientLeft,
    Receive,
    Reply,
    Scope,
    Send,
    fields_of,
    json_reply,
    pass_changed,
    replayed,
)
from skyrl.inference.remote import hand_over
from skyrl.inference.remote.cache import SCRATCH, Daemons, NodeCache, NodeFiles
from skyrl.inference.remote.references import NOT_STORED, STORE_AWAY, is_reference, key_in
from skyrl.inference.remote.settings import NodeSettings
from skyrl.storage.checkpoint_store.base import NotStored, StoreError
from skyrl.storage.checkpoint_store.directories import link_files, sizes_of
from skyrl.storage.checkpoint_store.registry import store_at
from skyrl.storage.checkpoint_store.versions import is_adapter

logger = logging.getLogger(__name__)

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_BODY = 2**16
WRITES_AT_ONCE = 4
GRACE_S = 60.0
"""The time between unloading an adapter and deleting its files: a request that still runs may make vLLM read them."""


class StoredAdapterLoads:
    """`settings` come from the environment. Raises ValueError if they are missing, and StoreError for a store that
    cannot be used."""

    def __init__(self, app: AsgiApp, settings: NodeSettings | None = None, grace_s: float = GRACE_S) -> None:
        settings = settings or NodeSettings.from_environment()
        store = store_at(settings.store, settings.store_options, settings.cache / SCRATCH)
        self._app = app
        self._key_hash = _hash(settings.api_key)
        self._grace_s = grace_s
        self._cache = NodeCache(store, settings.cache, settings.cache_bytes, is_adapter)
        self._files = NodeFiles(self._cache)
        self._writes = Daemons(WRITES_AT_ONCE)
        self._loaded: dict[str, set[str]] = {}
        """By name of an adapter that vLLM has loaded, or may have in a load without an answer, the keys of its files:
        several if loads of different files had no answer."""
        self._loading: Counter[str] = Counter()
        """By key, how many requests load it now."""
        self._unused_at: dict[str, float] = {}
        """By key of files that vLLM does not read, when its files may be deleted (`time.monotonic`)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._files.open()
        if self._unused_at:
            self._release_unused()
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else None
        if path not in (LOAD, UNLOAD) or not self._has_key(scope):
            await self._app(scope, receive, send)
            return
        handed = path == LOAD and content_type_of(scope["headers"]) == hand_over.CONTENT_TYPE
        try:
            if handed:
                body = await self._kept(Body(receive, hand_over.MAX_HEAD + hand_over.MOST_BYTES).pieces())
                scope = {**scope, "headers": [*(each for each in scope["headers"] if each[0] != JSON[0]), JSON]}
            else:
                body = await Body(receive, MAX_BODY).collect()
        except ClientLeft:
            return
        except BodyTooLarge as error:
            await _error(413, "BadRequestError", str(error)).send(send)
            return
        except hand_over.BadMessage as error:
            await _error(error.status, "BadRequestError", str(error)).send(send)
            return
        except OSError as error:
            await _refusal("in a message", error).send(send)
            return
        await (self._load if path == LOAD else self._unload)(scope, body, receive, send)

    async def _load(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        request = fields_of(body)
        reference = request.get("lora_path")
        if not isinstance(reference, str) or not is_reference(reference):
            await self._app(scope, replayed(body, receive), send)
            return
        key = key_in(reference)
        if key is None:
            await _error(400, "BadRequestError", f"lora_path: {reference!r} names no adapter in the store").send(send)
            return
        held = request.pop("held", None)
        if held is not None and not await self._has_held(key, Path(str(held))):
            await _error(hand_over.SEND_FILES, "SendFiles", "the files are not on this machine").send(send)
            return
        is_here = True  # also if this task is cancelled: the fetch goes on
        self._loading[key] += 1
        try:
            try:
                directory = await self._files.bring(key)
            except (StoreError, OSError) as error:
                is_here = False
                await _refusal(key, error).send(send)
                return
            local = json.dumps(request | {"lora_path": str(directory)}).encode()
            await self._pass_load(str(request.get("lora_name")), key, scope, local, receive, send)
        finally:
            self._loading[key] -= 1
            if not self._loading[key]:
                del self._loading[key]
            if is_here:
                self._note_unused(key)

    async def _has_held(self, key: str, held: Path) -> bool:
        """Take the files of an adapter that the engine has in memory, if this is the engine's machine."""
        try:
            sizes = await self._writes.run(lambda: sizes_of(held))
            if not is_adapter(sizes) or sum(sizes.values()) > hand_over.MOST_BYTES:
                return False
            async with self._files.adding(key, sum(sizes.values())) as directory:
                await self._writes.run(lambda: link_files(held, directory))
        except (OSError, ValueError):
            return False
        return True

    async def _kept(self, pieces: AsyncIterator[bytes]) -> bytes:
        """Keep the files of a message on this node. Returns the request that is in the message. Raises BadMessage,
        OSError, and the errors of a body."""
        head, begun = await hand_over.read_head(pieces)
        key = key_in(str(head.fields.get("lora_path")))
        if key is None:
            raise hand_over.BadMessage("lora_path: names no adapter in the store")
        async with self._files.adding(key, sum(head.sizes.values())) as directory:
            writer = hand_over.FilesWriter(directory, head.sizes)
            try:
                async for content in hand_over.in_pieces(begun, pieces):
                    await self._writes.run(partial(writer.write, content))
                await self._writes.run(writer.end)
            finally:
                writer.close()
        return json.dumps(head.fields).encode()

    async def _pass_load(self, name: str, key: str, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        status = None
        try:
            status = await pass_changed(self._app, scope, body, receive, send)
        finally:
            if status in (200, None):  # without an answer vLLM may have loaded the adapter all the same: the files stay
                self._loaded.setdefault(name, set()).add(key)
                self._unused_at.pop(key, None)

    async def _unload(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        status = await pass_changed(self._app, scope, body, receive, send)
        if status == 200:
            for key in self._loaded.pop(str(fields_of(body).get("lora_name")), ()):
                self._note_unused(key)

    def _note_unused(self, key: str) -> None:
        if not self._is_used(key):
            self._unused_at[key] = time.monotonic() + self._grace_s

    def _is_used(self, key: str) -> bool:
        return key in self._loading or any(key in keys for keys in self._loaded.values())

    def _release_unused(self) -> None:
        now = time.monotonic()
        for key in [key for key, at in self._unused_at.items() if at <= now]:
            if not (self._is_used(key) or key in self._files.bringing or key in self._files.releasing):
                del self._unused_at[key]
                self._files.release(key)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        scheme, _, key = given.decode("latin-1").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(_hash(key), self._key_hash)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _refusal(key: str, error: StoreError | OSError) -> Reply:
    if isinstance(error, NotStored):
        return _error(404, NOT_STORED, f"the checkpoint store has no adapter {key}")
    logger.warning("adapter %s could not be brought to this node: %s: %s", key, type(error).__name__, error)
    return _error(503, STORE_AWAY, f"adapter {key} cannot be brought to this node now")


def _error(status: int, kind: str, message: str) -> Reply:
    """In vLLM's form."""
    return json_reply(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})
