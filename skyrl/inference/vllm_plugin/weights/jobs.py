"""Work that takes longer than a call may: it runs in a thread, and calls ask for its state.

A call into a vLLM worker stops the engine until it returns. A thread does not, so samples go on. `WeightsError` is the
error of a call, and `Stages` counts where the time of a job goes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar


class WeightsError(Exception):
    """A call failed, and the model is as it was before. The message is for the client.

    `status` is the HTTP status: 400 for a mistake of the client's, 409 while another call runs, 501 for what this
    server cannot do.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


P = ParamSpec("P")
T = TypeVar("T")


class Stages:
    """Seconds by the name of a stage, added up over all calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def of(self, stage: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the work, and count its time for the stage, also if it raises."""
        began = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began


logger = logging.getLogger("vllm.skyrl_plugin")


class Job:
    """The work of `start` gets this job, asks `stopped` now and then, and returns a JSON object."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._result: dict[str, Any] = {}
        self._error: tuple[str, int] | None = None
        """Not the exception: its traceback holds the tensors of the failed work."""

    def start(self, work: Callable[[Job], dict[str, Any]]) -> None:
        # The work is not kept: it holds the tensors that it staged, and this job is kept until the next one
        threading.Thread(target=self._run, args=(work,), name=f"skyrl {self.name}", daemon=True).start()

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        self._stop.set()

    def state(self, wait_s: float) -> dict[str, Any]:
        """Raises the job's error."""
        if not self._ended.wait(wait_s):
            return {"running": True}
        if self._error is not None:
            raise WeightsError(*self._error)
        return {"running": False, **self._result}

    def _run(self, work: Callable[[Job], dict[str, Any]]) -> None:
        try:
            self._result = work(self)
        except WeightsError as error:
            self._error = str(error), error.status
        except Exception as error:  # logged, and told to whoever waits for the job
            logger.exception("%s failed", self.name)
            self._error = f"{self.name}: {str(error) or type(error).__name__}", 500
        finally:
            del work
            self._ended.set()


class Jobs:
    """One job at a time. `prepare` runs at the start of each job's thread."""

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        self._prepare = prepare
        self._last: Job | None = None

    def start(self, name: str, work: Callable[[Job], dict[str, Any]]) -> int:
        """The job's number. Raises WeightsError while another job runs."""
        self.check_idle()
        number = 1 if self._last is None else self._last.number + 1
        job, before = Job(name, number), self._last
        self._last = job

        def prepared(job: Job) -> dict[str, Any]:
            self._prepare()
            return work(job)

        try:
            job.start(prepared)
        except RuntimeError as error:  # there are too many threads
            self._last = before
            raise WeightsError(f"{name}: {error}", 500) from error
        return number

    def check_idle(self) -> None:
        if self._last is not None and self._last.running:
            raise WeightsError(f"{self._last.name} still runs", 409)

    def state(self, number: int, wait_s: float = 0.0) -> dict[str, Any]:
        """Waits up to `wait_s` for the job's end. Raises WeightsError: the job's own, or because the job is not
        known."""
        if self._last is None or self._last.number != number:
            raise WeightsError(f"there is no job {number}; vLLM may have been started again", 500)
        return self._last.state(wait_s)

    def stop(self) -> None:
        """Ask a job that runs to end early. Its state says when it has."""
        if self._last is not None:
            self._last.stop()
