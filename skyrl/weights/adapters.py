"""Adapter files as a medium: a save has written them, and inference servers read them by themselves.

Every version has a name of its own on the servers, so samples from older versions go on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from skyrl.base.types.weights import AdapterVersion


class AdapterFiles:
    """`load` makes all servers load a version. Its errors are those of `finish`."""

    def __init__(self, load: Callable[[AdapterVersion], Awaitable[None]]) -> None:
        self._load = load
        self._version: AdapterVersion | None = None

    async def begin(self, version: AdapterVersion) -> None:
        self._version = version

    async def send(self, part: AdapterVersion) -> None:
        """The part names the files; they are on the disk or in the checkpoint store. Raises ValueError for files of
        another version."""
        if part != self._version:
            raise ValueError(f"the files of {part.name} are not those of {self._version}")

    async def finish(self) -> None:
        assert self._version is not None
        await self._load(self._version)

    async def abandon(self) -> None:
        """There is nothing to take back: without `load` no server knows the version."""
