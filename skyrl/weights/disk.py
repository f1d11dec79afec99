"""A whole checkpoint on a disk that trainer and servers share, as a medium."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
from pathlib import Path

from safetensors.torch import save_file

from skyrl.weights.tensors import Part, check_sent
from skyrl.weights.workers import PauseMode, VersionOnDisk, Workers

INDEX = "model.safetensors.index.json"


class CheckpointOnDisk:
    """Each update has a directory of its own under `parent`, which is deleted at its end. With the pause `in_place`,
    samples in flight keep their cache, with the other pauses they compute it again; without a pause the servers refuse
    while samples are in flight."""

    def __init__(self, workers: Workers, parent: Path, pause: PauseMode | None = "in_place") -> None:
        self._workers = workers
        self._parent = parent
        self._pause: PauseMode | None = pause
        self._directory: Path | None = None
        self._version = ""
        self._shards: list[tuple[str, list[str]]] = []

    async def begin(self, version: str) -> None:
        """Raises OSError."""
        shown = re.sub(r"[^\w.-]", "_", version)
        directory = self._parent / f"weights-{shown}-{secrets.token_hex(4)}"
        directory.mkdir(parents=True)  # servers of another user read it, so it is not for this user alone
        self._directory, self._version, self._shards = directory, version, []

    async def send(self, part: Part) -> None:
        """Write one file. Raises OSError, ValueError for a dtype that servers do not take."""
        check_sent(part)
        writing = asyncio.ensure_future(asyncio.to_thread(self._write, part))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])  # the directory is deleted next
            raise

    def _write(self, part: Part) -> None:
        assert self._directory is not None
        name = f"model-{len(self._shards) + 1:05}.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in part.items()}, self._directory / name)
        with open(self._directory / name, "rb") as written:
            os.fsync(written.fileno())  # a server on another machine reads it
        self._shards.append((name, list(part)))

    async def finish(self) -> None:
        """Raises OSError, WorkersFailed."""
        await (await self._staged(VersionOnDisk(self._workers, self._pause))).finish()
        await self._delete()

    async def _staged(self, written: VersionOnDisk) -> VersionOnDisk:
        assert self._directory is not None
        index = {"weight_map": {tensor: file for file, tensors in self._shards for tensor in tensors}}
        (self._directory / INDEX).write_text(json.dumps(index))
        await written.begin(self._version)
        await written.send(self._directory.absolute())
        return written

    async def abandon(self) -> None:
        await self._delete()

    async def _delete(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            await asyncio.to_thread(shutil.rmtree, directory)
