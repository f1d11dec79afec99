"""A whole checkpoint that the servers find by themselves, as a medium: on their disk, or by a reference. Imports no
torch."""

from __future__ import annotations

from pathlib import Path

from skyrl.weights.workers import PauseMode, Workers


class VersionOnDisk:
    """The only part is the absolute path of the checkpoint, which must stay until `finish` has returned; or a reference
    for sidecars that bring files to their node. With the pause `in_place`, samples in flight keep their cache, with the
    other pauses they compute it again; without a pause the servers refuse while samples are in flight. `keep`: the
    servers keep the version's bytes, so that the next one may have it as its `base`, and only the elements that differ
    (`skyrl.weights.deltas`). `checksums`: of the version's tensors. The last three need sidecars.

    Sidecars read and check the files before the pause. SGLang's servers read them in the pause, because they load at
    once; without a pause they wait for the end of their samples."""

    def __init__(
        self,
        workers: Workers,
        pause: PauseMode | None = "in_place",
        *,
        keep: bool = False,
        base: str | None = None,
        checksums: dict[str, str] | None = None,
    ) -> None:
        self._more: dict[str, object] = {"keep": True, "base": base, "checksums": checksums} if keep else {}
        self._workers = workers
        self._pause: PauseMode | None = pause
        self._version = ""
        self._body: dict[str, object] | None = None

    async def begin(self, version: str) -> None:
        self._version, self._body = version, None

    async def send(self, part: Path | str) -> None:
        """Sidecars read and check the files while they sample. Raises WorkersFailed, NotStaged."""
        self._body = {
            "model_path": str(part),
            "weight_version": self._version,
            "flush_cache": self._pause != "in_place",
        } | self._more
        if self._more:
            await self._workers.check_all_stage("a version of changes, or with checksums,")
        if (stage := await self._workers.that_stage()) is not None:
            await stage.post("/update_weights_from_disk", self._body | {"stage_only": True})

    async def finish(self) -> None:
        """The pause is for the moment in which the weights change. Raises WorkersFailed."""
        assert self._body is not None
        async with self._workers.paused(self._pause):
            await self._workers.post("/update_weights_from_disk", self._body)

    async def abandon(self) -> None:
        """Servers forget what they have read when they read anything else."""
