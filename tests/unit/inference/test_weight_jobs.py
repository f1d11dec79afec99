"""Work in threads beside the engine."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

from skyrl.inference.vllm_plugin.weights.jobs import Job, Jobs, WeightsError


def ended(jobs: Jobs) -> None:
    """Wait for the threads of all jobs."""
    for thread in threading.enumerate():
        if thread.name.startswith("skyrl "):
            thread.join(10)


def test_one_job_at_a_time() -> None:
    jobs, go = Jobs(), threading.Event()

    def work(job: Job) -> dict[str, Any]:
        assert go.wait(10)
        return {"stopped": job.stopped()}

    number = jobs.start("reading", work)
    assert jobs.state(number) == {"running": True}
    with pytest.raises(WeightsError, match="reading still runs") as raised:
        jobs.start("another", work)
    assert raised.value.status == 409
    jobs.stop()
    go.set()
    ended(jobs)
    assert jobs.state(number) == {"running": False, "stopped": True}
    assert jobs.start("another", work) == number + 1
    with pytest.raises(WeightsError, match="there is no job 1"):
        jobs.state(number)
    ended(jobs)


@pytest.mark.parametrize(
    ("error", "message", "status"),
    [
        (WeightsError("no", 501), "no", 501),
        (MemoryError(), "reading: MemoryError", 500),
        (RuntimeError("bad"), "reading: bad", 500),
    ],
)
def test_each_question_for_a_failed_job_tells_its_error(error: Exception, message: str, status: int) -> None:
    jobs = Jobs()

    def work(_: Job) -> dict[str, Any]:
        raise error

    number = jobs.start("reading", work)
    ended(jobs)
    for _ in range(2):
        with pytest.raises(WeightsError, match=f"^{message}$") as raised:
            jobs.state(number)
        assert raised.value.status == status


class Large:
    """Stands for staged tensors."""


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_that_has_ended_holds_nothing_of_its_work(fails: bool) -> None:
    jobs = Jobs()

    def start() -> tuple[int, weakref.ref[Large]]:
        captured = Large()

        def work(_: Job) -> dict[str, Any]:
            local = captured
            if fails:
                raise WeightsError("no")
            return {"kind": type(local).__name__}

        return jobs.start("reading", work), weakref.ref(captured)

    number, large = start()
    ended(jobs)
    if fails:
        with pytest.raises(WeightsError):
            jobs.state(number)
    gc.collect()
    assert large() is None
