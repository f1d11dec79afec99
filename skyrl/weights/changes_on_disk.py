"""What changed since the last update, on a disk that trainer and servers share, as a medium."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import torch

from skyrl.weights.deltas import delta
from skyrl.weights.disk import new_directory, write_index, write_shard
from skyrl.weights.tensors import Part, check_sent, digest
from skyrl.weights.workers import PauseMode, VersionOnDisk, Workers, WorkersFailed


class ChangesOnDisk:
    """The first update sends all tensors, and the servers keep their bytes. Later ones send the elements whose bits
    have changed, and the servers make the whole version of them: the same bits as of a whole update, checked and
    applied in the same way. Servers name the version that they keep; if one of them keeps another, as after a restart,
    all get the whole version.

    The trainer keeps a copy of the last version, and so does each server, in main memory. Each update must have all
    tensors. Useful in bfloat16: in float32 nearly every element changes with each step. `checksums`: servers check
    the SHA-256 of each tensor that they have made.
    """

    def __init__(
        self, workers: Workers, parent: Path, pause: PauseMode | None = "in_place", *, checksums: bool = False
    ) -> None:
        self._workers = workers
        self._parent = parent
        self._pause: PauseMode | None = pause
        self._checksums = checksums
        self._base: str | None = None
        """The version that the servers keep; None: the next update sends all tensors."""
        self._last: dict[str, torch.Tensor] = {}
        """The tensors of that version, on their way to the next one."""
        self._version = ""
        self._sent: set[str] = set()
        self._shards: list[tuple[str, list[str]]] = []
        self._directory: Path | None = None
        self.sent_bytes = 0
        """Of the last update's tensors, as they were written."""

    async def begin(self, version: str) -> None:
        """Raises OSError."""
        self._version, self._sent, self._shards, self.sent_bytes = version, set(), [], 0
        self._directory = new_directory(self._parent, version)

    async def send(self, part: Part) -> None:
        """Raises OSError, ValueError for a dtype that servers do not take."""
        assert self._directory is not None
        check_sent(part)
        writing = asyncio.ensure_future(asyncio.to_thread(self._write_changes, part, self._directory))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])  # the directory is deleted next
            raise

    def _write_changes(self, part: Part, directory: Path) -> None:
        changed: Part = {}
        for name, tensor in part.items():
            new, old = tensor.detach().cpu().contiguous(), self._last.get(name)
            self._sent.add(name)
            if self._base is None or old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
                changed[name] = self._last[name] = new.clone()
                continue
            changed |= delta(name, old, new)
            old.copy_(new)
        self._write(changed, directory)

    def _write(self, part: Part, directory: Path) -> None:
        self.sent_bytes += sum(tensor.nbytes for tensor in part.values())
        self._shards.append((write_shard(part, directory, len(self._shards) + 1), list(part)))

    async def finish(self) -> None:
        """Raises OSError, WorkersFailed."""
        assert self._directory is not None
        for gone in self._last.keys() - self._sent:
            del self._last[gone]
        base, self._base = self._base, None
        written = await self._staged(base)
        await written.finish()
        self._base = self._version
        await self._delete()

    async def _staged(self, base: str | None) -> VersionOnDisk:
        assert self._directory is not None
        checksums = None
        if self._checksums:
            checksums = {name: await asyncio.to_thread(digest, name, tensor) for name, tensor in self._last.items()}
        write_index(self._directory, self._shards)
        written = VersionOnDisk(self._workers, self._pause, keep=True, base=base, checksums=checksums)
        await written.begin(self._version)
        try:
            await written.send(self._directory.absolute())
        except WorkersFailed as error:
            if base is None or not error.refused:
                raise
            await self._delete()
            self._directory, self._shards = new_directory(self._parent, self._version), []
            await asyncio.to_thread(self._write, self._last, self._directory)
            return await self._staged(None)
        return written

    async def abandon(self) -> None:
        """The next update sends all tensors."""
        self._base = None
        await self._delete()

    async def _delete(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            await asyncio.to_thread(shutil.rmtree, directory)
