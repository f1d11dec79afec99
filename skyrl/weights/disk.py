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
        self._directory = new_directory(self._parent, version)
        self._version, self._shards = version, []

    async def send(self, part: Part) -> None:
        """Write one file. Raises OSError, ValueError for a dtype that servers do not take."""
        assert self._directory is not None
        check_sent(part)
        writing = asyncio.ensure_future(asyncio.to_thread(write_shard, part, self._directory, len(self._shards) + 1))
        try:
            self._shards.append((await asyncio.shield(writing), list(part)))
        except asyncio.CancelledError:
            await asyncio.wait([writing])  # the directory is deleted next
            raise

    async def finish(self) -> None:
        """Raises OSError, WorkersFailed."""
        assert self._directory is not None
        write_index(self._directory, self._shards)
        written = VersionOnDisk(self._workers, self._pause)
        await written.begin(self._version)
        await written.send(self._directory.absolute())
        await written.finish()
        await self._delete()

    async def abandon(self) -> None:
        await self._delete()

    async def _delete(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            await asyncio.to_thread(shutil.rmtree, directory)


def new_directory(parent: Path, version: str) -> Path:
    """For one update. Raises OSError."""
    parent.mkdir(parents=True, exist_ok=True)
    shown = re.sub(r"[^\w.-]", "_", version)
    directory = parent / f"weights-{shown}-{secrets.token_hex(4)}"
    directory.mkdir()  # servers of another user read it, so it is not for this user alone
    return directory


def write_shard(part: Part, directory: Path, number: int) -> str:
    """The name of the file. Raises OSError."""
    name = f"model-{number:05}.safetensors"
    save_file({name: tensor.cpu().contiguous() for name, tensor in part.items()}, directory / name)
    with open(directory / name, "rb") as written:
        os.fsync(written.fileno())  # a server on another machine reads it
    return name


def write_index(directory: Path, shards: list[tuple[str, list[str]]]) -> None:
    """Which file has which tensors. Raises OSError."""
    index = {"weight_map": {tensor: file for file, tensors in shards for tensor in tensors}}
    (directory / INDEX).write_text(json.dumps(index))
