"""Around the sidecar of a placed vLLM: brings the full weights that a request names by a reference to this node."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from skyrl.inference.remote.asgi import (
    App,
    Message,
    Receive,
    Send,
    answer_json,
    body_of,
    fields_of,
    pass_on,
    replayed,
    with_length,
)
from skyrl.inference.remote.files import NodeFiles
from skyrl.inference.remote.references import BASE_MODEL, is_reference, key_in
from skyrl.storage.checkpoint_store.base import NotStored, StoreError

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

    def __init__(self, sidecar: App, files: NodeFiles, base_model: Callable[[], Awaitable[Path]], node: str) -> None:
        self._sidecar = sidecar
        self._files = files
        self._base_model = base_model
        self._node = node
        self._current: str | None = None
        self._held: set[str] = set()
        """Keys whose files this vLLM has on the node, `_current` among them."""
        self._in_use: Counter[str] = Counter()
        """How many requests bring or read each key's files now."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != UPDATE:
            await self._sidecar(scope, receive, send)
            return
        body = await body_of(receive, MAX_BODY)
        if body is None:
            await _refuse(send, 413, f"the body has more than {MAX_BODY} bytes")
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
            await _refuse(send, 500, self._why(str(path), error))
        else:
            status = await pass_on(self._sidecar, with_length(scope, len(local)), replayed(local, receive), send)
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


async def _refuse(send: Send, status: int, message: str) -> None:
    await answer_json(send, status, {"success": False, "message": message})
