"""The sidecar of a placed vLLM: runs beside it on its node, and listens at the node's address.

Other machines can reach it. So with a key for clients every request needs a key, also those that a sidecar on loopback
answers without. Takes its settings from the environment, where the vLLM's node has put them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl.inference.remote.asgi import App, Message, Receive, Send, answer_json
from skyrl.inference.remote.base_model import base_directory
from skyrl.inference.remote.cache import SCRATCH, NodeCache
from skyrl.inference.remote.files import NodeFiles
from skyrl.inference.remote.placed_sidecar import ADMIN_KEY, CLIENT_KEY, PlacedSidecar
from skyrl.inference.remote.placement_route import PlacementRoute
from skyrl.inference.remote.settings import API_KEY, STORE, NodeSettings
from skyrl.inference.remote.versions import StoredVersions
from skyrl.inference.sidecar.main import run_sidecar
from skyrl.inference.sidecar.settings import SidecarSettings
from skyrl.inference.sidecar.updates import Updates
from skyrl.runtime.processes.runtime import run_process, set_up_process
from skyrl.runtime.web.admin import AdminKey
from skyrl.storage.checkpoint_store.registry import store_at
from skyrl.storage.checkpoint_store.versions import is_full_version


class KeyNeeded:
    """An ASGI application around another one, for requests with one of the keys."""

    def __init__(self, app: App, *keys: str | None) -> None:
        self._app = app
        self._keys = [AdminKey(key) for key in keys]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not any(key.is_given(scope) for key in self._keys):
            message = "Authorization: Bearer <the key> is missing or wrong"
            await answer_json(send, 401, {"success": False, "message": message, "error": {"message": message}})
            return
        await self._app(scope, receive, send)


def around(sidecar: Any, placed: PlacedSidecar, values: Mapping[str, str]) -> App:
    """What is around a `skyrl.inference.sidecar.app.Sidecar`: the placement process's route, the node's cache if the
    environment names a checkpoint store, and the keys."""
    admin, client = values.get(ADMIN_KEY), values.get(CLIENT_KEY)
    updates: Updates = sidecar.updates
    app: App = PlacementRoute(sidecar, updates, AdminKey(admin))
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
        drain_s=0.0,
    )

    def run() -> None:
        run_sidecar(settings, lambda sidecar: around(sidecar, placed, os.environ))

    run_process("the sidecar", run, lambda _: None)


if __name__ == "__main__":
    main()
