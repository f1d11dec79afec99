"""The sidecar of a placed vLLM: runs beside it on its node, and listens at the node's address.

Other machines can reach it. So with a key for clients every request needs a key, also those that a sidecar on loopback
answers without. Takes its settings from the environment, where the vLLM's node has put them.

Two ASGI applications are around the sidecar. `StoredVersions` brings the full weights that a request names by a
reference to this node. `PlacementRoute` is the route by which the placement process learns of updates, and tells of
those before. A vLLM that starts has its first weights, and its sidecar started with it. Only the placement process
knows whether the vLLMs were updated meanwhile, perhaps on a node that is gone."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl.http.admin_key import AdminKey
from skyrl.http.messages import (
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
from skyrl.inference.remote.cache import SCRATCH, NodeCache, NodeFiles
from skyrl.inference.remote.references import BASE_MODEL, base_directory, is_reference, key_in
from skyrl.inference.remote.settings import ADMIN_KEY, API_KEY, CLIENT_KEY, STORE, NodeSettings, PlacedSidecar
from skyrl.inference.sidecar.errors import SidecarError
from skyrl.inference.sidecar.main import run_sidecar
from skyrl.inference.sidecar.settings import SidecarSettings
from skyrl.inference.sidecar.updates import Updates
from skyrl.runtime.processes.runtime import run_process, set_up_process
from skyrl.storage.checkpoint_store.base import NotStored, StoreError
from skyrl.storage.checkpoint_store.registry import store_at
from skyrl.storage.checkpoint_store.versions import is_full_version

PATH = "/placed"


@dataclass(eq=False)
class PlacementRoute:
    """An ASGI application around the sidecar. `GET /placed` answers `{"updated": bool}`: whether this vLLM got new
    weights. `POST /placed` says that others got some before it started: it is not healthy until it is updated. Both
    need the admin key."""

    sidecar: AsgiApp
    updates: Updates
    key: AdminKey

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.sidecar(scope, receive, send)
            return
        await (await self._reply(scope)).send(send)

    async def _reply(self, scope: Scope) -> Reply:
        if (refusal := self.key.refusal(scope)) is not None:
            return json_reply(refusal[0], {"error": {"message": refusal[1]}})
        try:
            if scope["method"] == "POST":
                await self.updates.outdate()
        except SidecarError as error:
            return json_reply(error.status, {"error": {"message": error.message}})
        return json_reply(200, {"updated": self.updates.was_updated})


logger = logging.getLogger(__name__)

UPDATE = "/update_weights_from_disk"
MAX_BODY = 64 * 2**20
"""Bytes: a request may hold a checksum for each tensor."""


class StoredVersions:
    """An ASGI application around `sidecar`. Other requests pass unchanged. `base_model` finds the base model's
    directory. `node` is this machine's name in messages.

    Two versions stay on the node for this vLLM: the one that it has, for its next start, and the one that it was asked
    to read last.
    """

    def __init__(
        self, sidecar: AsgiApp, files: NodeFiles, base_model: Callable[[], Awaitable[Path]], node: str
    ) -> None:
        self._sidecar = sidecar
        self._files = files
        self._base_model = base_model
        self._node = node
        self._current: str | None = None
        self._held: set[str] = set()
        """Keys whose files this vLLM has on the node, `_current` among them."""
        self._in_use: Counter[str] = Counter()
        """How many requests bring or read each key's files now."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != UPDATE:
            await self._sidecar(scope, receive, send)
            return
        try:
            body = await Body(receive, MAX_BODY).collect()
        except ClientLeft:
            return
        except BodyTooLarge:
            await _failed(413, f"the body has more than {MAX_BODY} bytes").send(send)
            return
        request = fields_of(body)
        path = request.get("model_path")
        key = key_in(path) if isinstance(path, str) and is_reference(path) else None
        if key is None and path != BASE_MODEL:
            await self._sidecar(scope, replayed(body, receive), send)
            return
        used = () if key is None else (key,)
        self._in_use.update(used)
        try:
            directory = await (self._base_model() if key is None else self._brought(key))
            local = json.dumps(request | {"model_path": str(directory)}).encode()
        except (StoreError, OSError) as error:
            await _failed(500, self._why(str(path), error)).send(send)
        else:
            status = await pass_changed(self._sidecar, scope, local, receive, send)
            if status == 200 and not request.get("stage_only"):
                self._current = key
                self._keep({key})
        finally:
            self._in_use.subtract(used)
            self._in_use = +self._in_use  # without the keys that nobody uses

    async def _brought(self, key: str) -> Path:
        self._keep({key, self._current})
        self._held.add(key)
        return await self._files.bring(key)

    def _keep(self, keys: set[str | None]) -> None:
        """Delete this vLLM's files of other versions that no request uses: it reads a version once, and not again."""
        unused = {key for key in self._held - keys if not self._in_use[key]}
        for key in unused:
            self._files.release(key)
        self._held -= unused

    def _why(self, path: str, error: Exception) -> str:
        if isinstance(error, NotStored):
            why = "the checkpoint store has no such version any more"
        else:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
        sentence = f"{path} cannot be brought to node {self._node}: {why}"
        logger.warning("%s", sentence)
        return sentence


def _failed(status: int, message: str) -> Reply:
    return json_reply(status, {"success": False, "message": message})


class KeyNeeded:
    """An ASGI application around another one, for requests with one of the keys."""

    def __init__(self, app: AsgiApp, *keys: str | None) -> None:
        self._app = app
        self._keys = [AdminKey(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not any(key.is_in(scope["headers"]) for key in self._keys):
            message = "Authorization: Bearer <the key> is missing or wrong"
            answer = {"success": False, "message": message, "error": {"message": message}}
            await json_reply(401, answer).send(send)
            return
        await self._app(scope, receive, send)


def around(sidecar: Any, placed: PlacedSidecar, values: Mapping[str, str]) -> AsgiApp:
    """What is around a `skyrl.inference.sidecar.app.Sidecar`: the placement process's route, the node's cache if the
    environment names a checkpoint store, and the keys."""
    admin, client = values.get(ADMIN_KEY), values.get(CLIENT_KEY)
    updates: Updates = sidecar.updates
    app: AsgiApp = PlacementRoute(sidecar, updates, AdminKey(admin))
    if STORE in values:
        settings = NodeSettings.from_environment(values)
        store = store_at(settings.store, settings.store_options, settings.cache / SCRATCH)
        files = NodeFiles(NodeCache(store, settings.cache, settings.cache_bytes, is_full_version))
        files.open()

        async def base_model() -> Path:
            return await asyncio.to_thread(base_directory, placed.base_model)

        app = StoredVersions(app, files, base_model, placed.host)
    return app if client is None else KeyNeeded(app, admin, client)


def main() -> None:
    placed = PlacedSidecar.from_environment(os.environ)
    set_up_process(placed.log_level, placed.log_format, "sidecar")
    settings = SidecarSettings(
        vllm_url=placed.vllm_url,
        vllm_api_key=os.environ[API_KEY],
        admin_key=os.environ.get(ADMIN_KEY),
        number=placed.number,
        host=placed.host,
        port=placed.port,
        max_body_bytes=placed.max_body_bytes,
        drain_s=0.0,
    )

    def run() -> None:
        run_sidecar(settings, lambda sidecar: around(sidecar, placed, os.environ))

    run_process("the sidecar", run, lambda _: None)


if __name__ == "__main__":
    main()
