"""The one update that has arrived in a worker and is not in its model yet, with the memory in which it lies."""

from __future__ import annotations

import logging
import threading

from skyrl.inference.vllm_plugin.weights.errors import WeightsError
from skyrl.inference.vllm_plugin.weights.jobs import Job
from skyrl.inference.vllm_plugin.weights.staging import Staged
from skyrl.weights.kept_memory import KeptMemory

logger = logging.getLogger("vllm.skyrl_plugin")


class StagingArea:
    """A job may find at its end that what it has staged was dropped meanwhile: then `staged` is something else."""

    def __init__(self) -> None:
        self.staged: Staged | None = None
        self.memory = KeptMemory()
        self._base: Staged | None = None
        self._freeing: threading.Thread | None = None

    def begun(self, version: str | None, source: str) -> Staged:
        """What is staged of this update. Another one is forgotten. No job may run."""
        if not self.holds(version, source):
            if self.staged is not None and self.staged.tensors:
                logger.warning("an update to %r was not finished: it is forgotten", self.staged.version)
            self.forget()
            self.staged = Staged(version, source)
        assert self.staged is not None
        return self.staged

    def holds(self, version: str | None, source: str) -> bool:
        """Whether something of this update is staged, perhaps no tensor yet."""
        return self.staged is not None and (self.staged.version, self.staged.source) == (version, source)

    def stage(self, staged: Staged, job: Job) -> None:
        """At the end of a job that has read a whole update. Raises WeightsError if the job was told to stop."""
        self.staged = staged
        if job.stopped():  # asked after the line above: a stop in between must not leave anything staged
            self.staged = None
            raise WeightsError("reading was stopped")

    def drop(self, staged: Staged) -> None:
        """A job has failed with this update, unless another one is here by now."""
        if self.staged is staged:
            self.staged = None

    def forget(self) -> None:
        """Drop what is staged, and begin with the memory anew. No job may run."""
        self.staged = None
        if self._freeing is not None:
            self._freeing.join()
        self.memory.reuse()

    def keep_base(self, staged: Staged | None) -> None:
        """The bytes of this update are the base of a later one; None: there is no base."""
        self._base = staged

    def take_base(self) -> Staged | None:
        """The update whose bytes were kept, which is the caller's now."""
        base, self._base = self._base, None
        return base

    def free_memory(self) -> None:
        """After an update was applied: its memory is the next one's. In a thread: it takes 0.1 s per GiB, for which the
        engine need not wait."""
        self._freeing = threading.Thread(target=self.memory.reuse, name="skyrl memory", daemon=True)
        self._freeing.start()
