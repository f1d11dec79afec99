"""What changed since the last update, on a disk that trainer and servers share, as a medium."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from skyrl.weights.deltas import delta
from skyrl.weights.disk import CheckpointOnDisk
from skyrl.weights.tensors import Part, digest
from skyrl.weights.workers import PauseMode, VersionOnDisk, Workers, WorkersFailed


class ChangesOnDisk(CheckpointOnDisk):
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
        super().__init__(workers, parent, pause)
        self._checksums = checksums
        self._base: str | None = None
        """The version that the servers keep; None: the next update sends all tensors."""
        self._last: dict[str, torch.Tensor] = {}
        """The tensors of that version, on their way to the next one."""
        self._sent: set[str] = set()
        self.sent_bytes = 0
        """Of the last update's tensors, as they were written."""

    async def begin(self, version: str) -> None:
        """Raises OSError."""
        self._sent, self.sent_bytes = set(), 0
        await super().begin(version)

    def _write(self, part: Part) -> None:
        changed: Part = {}
        for name, tensor in part.items():
            new, old = tensor.detach().cpu().contiguous(), self._last.get(name)
            self._sent.add(name)
            if self._base is None or old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
                changed[name] = self._last[name] = new.clone()
                continue
            changed |= delta(name, old, new)
            old.copy_(new)
        self._write_all(changed)

    def _write_all(self, part: Part) -> None:
        self.sent_bytes += sum(tensor.nbytes for tensor in part.values())
        super()._write(part)

    async def finish(self) -> None:
        """Raises OSError, WorkersFailed."""
        for gone in self._last.keys() - self._sent:
            del self._last[gone]
        base, self._base = self._base, None
        try:
            written = await self._staged(await self._kept(base))
        except WorkersFailed as error:
            if base is None or not error.refused:
                raise
            await self._delete()
            await super().begin(self._version)
            await asyncio.to_thread(self._write_all, self._last)
            written = await self._staged(await self._kept(None))
        await written.finish()
        self._base = self._version
        await self._delete()

    async def _kept(self, base: str | None) -> VersionOnDisk:
        checksums = None
        if self._checksums:
            checksums = {name: await asyncio.to_thread(digest, name, tensor) for name, tensor in self._last.items()}
        return VersionOnDisk(self._workers, self._pause, keep=True, base=base, checksums=checksums)

    async def abandon(self) -> None:
        """The next update sends all tensors."""
        self._base = None
        await super().abandon()
