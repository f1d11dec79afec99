"""Pauses in front of a vLLM that does what a test says: their order, and what fails.

tests/plane/test_pauses.py has real vLLMs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from skyrl.inference.sidecar.in_flight import PauseMode
from tests.component.router_world import Exchange, until
from tests.component.sidecar_world import (
    FakeVllm,
    RunningSidecar,
    answers,
    choice,
    completion,
    sidecar_and,
    sidecar_before,
)

DONE = completion(choice([8]))
ENDED = completion(choice([8], finish_reason="abort"))
JSON = {"Content-Type": "application/json"}


class PausableVllm(FakeVllm):
    """Ends samples when `end` is set and vLLM is not paused, and when they are aborted. `calls` has the paths of all
    requests but those for facts, in order."""

    def __init__(self, *, paused: bool = False) -> None:
        super().__init__(self._sample)
        self.end = asyncio.Event()
        self.resumed = asyncio.Event()
        self.abort = asyncio.Event()
        self.is_paused = paused
        if not paused:
            self.resumed.set()
        self.reset = True
        self.answer |= {
            "/pause?mode=keep&clear_cache=false": self._pause,
            "/pause?mode=abort&clear_cache=false": self._pause,
            "/resume": self._resume,
            "/is_paused": self._paused,
            "/abort_requests": self._abort,
            "/reset_prefix_cache": self._reset,
            "/reset_prefix_cache?reset_running_requests=true": self._reset,
        }

    @property
    def calls(self) -> list[str]:
        paths = [one.path for one in self.received]
        return [path for path in paths if path not in ("/v1/models", "/is_paused", "/weight_info", "/collective_rpc")]

    async def _sample(self, exchange: Exchange) -> None:
        aborted = self.abort
        while not aborted.is_set() and not (self.end.is_set() and self.resumed.is_set()):
            waiting = [asyncio.create_task(one.wait()) for one in (aborted, self.end, self.resumed) if not one.is_set()]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waiting:
                    one.cancel()
        await answers(ENDED if aborted.is_set() else DONE)(exchange)

    async def _pause(self, exchange: Exchange) -> None:
        self.is_paused = True
        self.resumed.clear()
        if "abort" in exchange.request.path:
            self._end_all()
        await answers({"status": "paused"})(exchange)

    async def _resume(self, exchange: Exchange) -> None:
        self.is_paused = False
        self.resumed.set()
        await answers({"status": "resumed"})(exchange)

    async def _paused(self, exchange: Exchange) -> None:
        await answers({"is_paused": self.is_paused})(exchange)

    async def _abort(self, exchange: Exchange) -> None:
        self._end_all()
        await answers({"status": "aborted"})(exchange)

    async def _reset(self, exchange: Exchange) -> None:
        await answers({"success": self.reset})(exchange)

    def _end_all(self) -> None:
        self.abort.set()
        self.abort = asyncio.Event()


async def loads(sidecar: RunningSidecar) -> tuple[int, int]:
    """Running and waiting."""
    _, answer = await sidecar.post("/v1/loads")
    return answer["loads"][0]["num_running_reqs"], answer["loads"][0]["num_waiting_reqs"]


async def until_loads(sidecar: RunningSidecar, running: int, waiting: int) -> None:
    while await loads(sidecar) != (running, waiting):
        pass


async def pause(sidecar: RunningSidecar, mode: str) -> None:
    expected = {"message": "Generation paused successfully.", "status": "ok"}
    assert await sidecar.post("/pause_generation", {"mode": mode}) == (200, expected)


async def resume(sidecar: RunningSidecar) -> None:
    expected = {"message": "Generation continued successfully.", "status": "ok"}
    assert await sidecar.post("/continue_generation") == (200, expected)


@contextlib.asynccontextmanager
async def pausable(
    *, paused: bool = False, ended: bool = False, **options: Any
) -> AsyncIterator[tuple[RunningSidecar, PausableVllm]]:
    vllm = PausableVllm(paused=paused)
    if ended:
        vllm.end.set()
    async with sidecar_and(vllm, **options) as world:
        yield world


async def test_new_requests_wait_and_vllm_gets_them_in_the_end() -> None:
    async with pausable(ended=True) as (sidecar, vllm):
        await pause(sidecar, "in_place")
        mine = asyncio.create_task(sidecar.generate())
        await until_loads(sidecar, 0, 1)
        passing = asyncio.create_task(sidecar.post("/v1/completions", {"prompt": [1]}, headers=JSON))
        await until_loads(sidecar, 0, 2)
        assert vllm.bodies == []
        assert (await sidecar.post("/flush_cache"))[0] == 200
        await resume(sidecar)
        assert ((await mine)[0], (await passing)[0]) == (200, 200)
        assert await loads(sidecar) == (0, 0)
    calls = [path for path in vllm.calls if path != "/metrics"]
    assert calls[:3] == ["/pause?mode=keep&clear_cache=false", "/reset_prefix_cache", "/resume"]
    assert sorted(calls[3:]) == ["/v1/completions"] * 2


@pytest.mark.parametrize(("mode", "flushed"), [("in_place", 400), ("retract", 200)])
async def test_frozen_requests_count_and_only_retracted_ones_lose_their_cache(mode: str, flushed: int) -> None:
    async with pausable() as (sidecar, vllm):
        mine = asyncio.create_task(sidecar.generate())
        await until(lambda: bool(vllm.bodies))
        await pause(sidecar, mode)
        vllm.end.set()
        assert await loads(sidecar) == (1, 0)
        for timeout_s in (0, 0.05):
            assert (await sidecar.post("/flush_cache", {"timeout": timeout_s}))[0] == flushed
        assert not mine.done()
        await resume(sidecar)
        assert (await mine)[1]["meta_info"]["finish_reason"]["type"] == "length"
    asked = "/reset_prefix_cache?reset_running_requests=true"
    assert (asked in vllm.calls) == (mode == "retract")


@pytest.mark.parametrize("first", [None, "in_place", "retract"])
async def test_abort_ends_what_runs_or_is_frozen(first: str | None) -> None:
    async with pausable() as (sidecar, vllm):
        asked = asyncio.gather(*(sidecar.generate() for _ in range(2)))
        passing = asyncio.create_task(sidecar.post("/v1/completions", {"prompt": [1]}, headers=JSON))
        await until(lambda: len(vllm.bodies) == 3)
        if first is not None:
            await pause(sidecar, first)
        waiting = asyncio.create_task(sidecar.generate()) if first else None
        await until_loads(sidecar, 3, 1 if first else 0)
        await pause(sidecar, "abort")
        assert await loads(sidecar) == (0, 1 if first else 0)
        for status, answer in await asked:
            assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        assert (await passing)[1]["choices"][0]["finish_reason"] == "abort"
        vllm.end.set()
        await resume(sidecar)
        if waiting is not None:
            assert (await waiting)[1]["meta_info"]["finish_reason"]["type"] == "length"


async def test_abort_reaches_a_request_that_is_on_its_way_to_vllm() -> None:
    """It passed the gate before the pause, and vLLM gets it afterwards."""
    vllm = PausableVllm()
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def late(exchange: Exchange) -> None:
        arrived.set()
        await go_on.wait()
        await vllm._sample(exchange)

    async def pause_first(exchange: Exchange) -> None:
        await vllm._pause(exchange)
        go_on.set()

    vllm.complete = late
    vllm.answer["/pause?mode=abort&clear_cache=false"] = pause_first
    async with sidecar_before(vllm) as sidecar:
        mine = asyncio.create_task(sidecar.generate())
        await arrived.wait()
        await pause(sidecar, "abort")
        assert (await mine)[1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert "/abort_requests" in vllm.calls


async def test_what_waits_can_be_aborted() -> None:
    async with pausable() as (sidecar, vllm):
        await pause(sidecar, "in_place")
        one, other = (asyncio.create_task(sidecar.generate(rid=rid)) for rid in ("a", "b"))
        passing = asyncio.create_task(sidecar.post("/v1/completions", {"prompt": [1]}, headers=JSON))
        await until_loads(sidecar, 0, 3)
        await sidecar.post("/abort_request", {"rid": "a"})
        assert (await one)[1]["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
        await sidecar.post("/abort_request", {"abort_all": True})
        assert (await other)[1]["output_ids"] == []
        status, answer = await passing
        assert (status, answer["error"]["message"][:23]) == (503, "the request was aborted")
        assert await loads(sidecar) == (0, 0)
        assert vllm.bodies == []


@pytest.mark.parametrize(("path", "prompt"), [("/generate", "input_ids"), ("/v1/completions", "prompt")])
async def test_a_client_that_leaves_while_it_waits_is_forgotten(path: str, prompt: str) -> None:
    async with pausable() as (sidecar, vllm):
        await pause(sidecar, "retract")
        asked = asyncio.create_task(sidecar.post(path, {prompt: [5]}))
        await until_loads(sidecar, 0, 1)
        asked.cancel()
        await until_loads(sidecar, 0, 0)
        await resume(sidecar)
        assert vllm.bodies == []


async def test_a_sampling_request_without_a_body_waits_like_others() -> None:
    vllm = PausableVllm()
    vllm.end.set()
    vllm.complete = answers({"error": {"message": "no body"}}, "400 Bad Request")
    async with sidecar_before(vllm) as sidecar:
        await pause(sidecar, "in_place")
        vllm.answer["/v1/completions"] = vllm.complete
        asked = asyncio.create_task(sidecar.post("/v1/completions"))
        await until_loads(sidecar, 0, 1)
        await resume(sidecar)
        assert (await asked)[0] == 400


async def test_what_waits_has_a_bound() -> None:
    async with pausable(max_in_flight=2) as (sidecar, vllm):
        await pause(sidecar, "in_place")
        asked = [asyncio.create_task(sidecar.post("/v1/completions", {"prompt": [1]}, headers=JSON)) for _ in range(2)]
        await until_loads(sidecar, 0, 2)
        status, answer = await sidecar.post("/v1/completions", {"prompt": [1]}, headers=JSON)
        assert (status, "paused" in answer["error"]["message"]) == (503, True)
        vllm.end.set()
        await resume(sidecar)
        assert [status for status, _ in await asyncio.gather(*asked)] == [200, 200]


async def test_a_sidecar_that_stops_while_paused_answers_everything() -> None:
    async with pausable(drain_s=0.05) as (sidecar, vllm):
        frozen = asyncio.create_task(sidecar.generate())
        await until(lambda: bool(vllm.bodies))
        await pause(sidecar, "in_place")
        waiting = asyncio.create_task(sidecar.generate())
        passing = asyncio.create_task(sidecar.post("/v1/completions", {"prompt": [1]}, headers=JSON))
        await until_loads(sidecar, 1, 2)
        await sidecar.app.drain()
        assert sidecar.app.in_flight.idle.is_set()
        assert [(await one)[1]["meta_info"]["finish_reason"]["type"] for one in (frozen, waiting)] == ["abort"] * 2
        assert (await passing)[0] == 503
        assert (await sidecar.post("/v1/completions", {"prompt": [1]}, headers=JSON))[0] == 503


async def test_a_pause_that_vllm_refuses_changes_nothing() -> None:
    async with pausable(ended=True) as (sidecar, vllm):
        for answer, status in ((({"detail": "Not Found"}, "404 Not Found"), 501), (({}, "400 Bad Request"), 503)):
            vllm.answer["/pause?mode=keep&clear_cache=false"] = answers(*answer)
            got, body = await sidecar.post("/pause_generation", {"mode": "in_place"})
            assert (got, body["success"]) == (status, False)
            assert (await sidecar.generate())[0] == 200
        status, body = await sidecar.post("/pause_generation", {"mode": "wait"})
        assert (status, body["message"]) == (400, "mode: 'wait' is not one of abort, retract, in_place")
    assert "/resume" not in vllm.calls


@pytest.mark.parametrize("outcome", ["no answer", "an error", "a broken connection"])
async def test_a_pause_of_unknown_outcome_is_undone(outcome: str) -> None:
    """vLLM may be paused though it did not say so. Then nobody would continue it."""
    vllm, released = PausableVllm(), asyncio.Event()
    vllm.end.set()

    async def paused_all_the_same(exchange: Exchange) -> None:
        vllm.is_paused = True
        vllm.resumed.clear()
        if outcome == "no answer":
            await released.wait()
        elif outcome == "an error":
            await answers({"error": "Failed to pause generation"}, "500 Internal Server Error")(exchange)
        exchange.break_off()

    vllm.answer["/pause?mode=keep&clear_cache=false"] = paused_all_the_same
    async with sidecar_before(vllm, rpc_s=1.0) as sidecar:
        status, answer = await sidecar.post("/pause_generation", {"mode": "in_place"})
        assert (status, answer["message"].partition(":")[0]) == (503, "generation was not paused")
        assert (await sidecar.generate())[0] == 200
        assert not vllm.is_paused
        released.set()


async def test_a_pause_without_vllm_leaves_nobody_waiting() -> None:
    async with pausable(ended=True) as (sidecar, vllm):
        assert (await sidecar.generate())[0] == 200
        await vllm.stop()
        assert (await sidecar.post("/pause_generation"))[0] == 503
        assert (await sidecar.generate())[0] == 503


async def test_continuing_fails_until_vllm_does() -> None:
    async with pausable(ended=True) as (sidecar, vllm):
        await pause(sidecar, "in_place")
        vllm.answer["/resume"] = answers({"error": "no"}, "503 Service Unavailable")
        assert (await sidecar.post("/continue_generation"))[0] == 503
        waiting = asyncio.create_task(sidecar.generate())
        await until_loads(sidecar, 0, 1)
        vllm.answer["/resume"] = vllm._resume
        await resume(sidecar)
        assert (await waiting)[0] == 200


async def test_a_vllm_that_is_started_again_while_paused_gets_nothing_until_it_is_continued() -> None:
    async with pausable() as (sidecar, vllm):
        frozen = asyncio.create_task(sidecar.generate())
        await until(lambda: bool(vllm.bodies))
        await pause(sidecar, "in_place")
        await vllm.stop()
        assert (await frozen)[0] == 503
        vllm.is_paused = False
        vllm.resumed.set()
        vllm.end.set()
        await vllm.start()
        waiting = asyncio.create_task(sidecar.generate())
        await until_loads(sidecar, 0, 1)
        assert len(vllm.bodies) == 1
        await resume(sidecar)
        assert (await waiting)[0] == 200


async def test_a_sidecar_finds_vllm_paused() -> None:
    """An earlier one has paused it."""
    async with pausable(paused=True, ended=True) as (sidecar, vllm):
        await until(lambda: sidecar.app.pause.mode is PauseMode.IN_PLACE)
        waiting = asyncio.create_task(sidecar.generate())
        await until_loads(sidecar, 0, 1)
        assert vllm.bodies == []
        await resume(sidecar)
        assert (await waiting)[0] == 200


async def test_a_pause_that_was_found_ends_with_the_update_that_the_weights_wait_for() -> None:
    """An earlier sidecar has paused vLLM because its weights were old."""
    async with pausable(paused=True) as (sidecar, vllm):
        pauses, updates = sidecar.app.pause, sidecar.app.updates
        await until(lambda: pauses.mode is PauseMode.IN_PLACE)
        await updates.outdate()
        assert vllm.is_paused
        await updates._trouble.take_over(None)
        assert (vllm.is_paused, sidecar.app.in_flight.opened.is_set()) == (False, True)
        await pause(sidecar, "in_place")
        await updates.outdate()
        await updates._trouble.take_over(None)
        assert vllm.is_paused, "a pause by hand goes on"


async def test_a_hold_and_a_pause_by_hand_end_one_by_one() -> None:
    async with pausable() as (sidecar, vllm):
        pauses = sidecar.app.pause
        async with pauses.held():
            await pause(sidecar, "in_place")
        assert vllm.is_paused
        assert not sidecar.app.in_flight.opened.is_set()
        async with pauses.held():
            async with pauses.held():
                await resume(sidecar)
            assert vllm.is_paused
        assert not vllm.is_paused
        async with pauses.held() as hold:
            hold.stays_paused = True
        assert (vllm.is_paused, pauses.mode) == (True, PauseMode.IN_PLACE)
        await resume(sidecar)
        assert sidecar.app.in_flight.opened.is_set()


async def test_a_hold_that_cannot_continue_does_so_later() -> None:
    async with pausable(ended=True) as (sidecar, vllm):
        vllm.answer["/resume"] = answers({"error": "no"}, "500 Internal Server Error")
        async with sidecar.app.pause.held():
            waiting = asyncio.create_task(sidecar.generate())
            await until_loads(sidecar, 0, 1)
        assert vllm.is_paused
        vllm.answer["/resume"] = vllm._resume
        assert (await waiting)[0] == 200


async def test_pauses_and_continuations_at_once_end_in_the_state_of_the_last() -> None:
    async with pausable(ended=True) as (sidecar, vllm):
        samples = [asyncio.create_task(sidecar.generate()) for _ in range(5)]
        calls = [sidecar.post("/pause_generation", {"mode": mode}) for mode in PauseMode for _ in range(5)]
        calls += [sidecar.post("/continue_generation") for _ in range(5)]
        assert {status for status, _ in await asyncio.gather(*calls)} == {200}
        last = [path for path in vllm.calls if path not in ("/v1/completions", "/metrics")][-1]
        opened = sidecar.app.in_flight.opened
        assert opened.is_set() == (not vllm.is_paused) == (last == "/resume") == (sidecar.app.pause.mode is None)
        await resume(sidecar)
        assert (opened.is_set(), vllm.is_paused) == (True, False)
        assert {status for status, _ in await asyncio.gather(*samples)} == {200}


async def test_a_probe_does_not_hide_that_the_weights_are_not_whole() -> None:
    """`/health_generate` samples only from a vLLM that `/health` would call healthy."""
    vllm = PausableVllm()
    vllm.end.set()
    broken = {"results": [{"ok": True, "broken": "half of an update"}]}

    async def state(exchange: Exchange) -> None:
        assert json.loads(exchange.request.body)["args"][0] == "state"
        await answers(broken)(exchange)

    vllm.answer["/collective_rpc"] = state
    async with sidecar_before(vllm) as sidecar:
        await until(lambda: sidecar.app.updates.trouble is not None)
        vllm.is_paused = False
        for path in ("/health", "/health_generate"):
            status, answer = await sidecar.post(path)
            assert (status, answer["error"]["message"]) == (503, "half of an update")
        assert vllm.bodies == []
