"""Parts of a server that need each other: the order in which they stop, and the cases in which one ends the server."""

from __future__ import annotations

import asyncio

import pytest

from skyrl.cli.launcher.parts import Part, Parts, ServerEnded


class RecordingParts:
    """Parts whose starts, stops and ends of supervision are recorded in `events`."""

    def __init__(self) -> None:
        self.parts = Parts()
        self.events: list[str] = []
        self.may_stop: dict[str, asyncio.Event] = {}
        self.may_end: dict[str, asyncio.Future[None]] = {}

    async def add(self, name: str, *needs: str, **options: float) -> None:
        self.may_stop[name] = asyncio.Event()
        self.may_stop[name].set()
        self.may_end[name] = asyncio.get_running_loop().create_future()

        async def start() -> None:
            self.events.append(f"{name} starts")

        async def supervise() -> None:
            try:
                await self.may_end[name]
            finally:
                self.events.append(f"{name} is not supervised")

        async def stop() -> None:
            self.events.append(f"{name} stops")
            await self.may_stop[name].wait()
            if not self.may_end[name].done():
                self.may_end[name].set_result(None)  # the supervision of a stopped process returns
                await self.wait_for(f"{name} is not supervised")
            self.events.append(f"{name} has stopped")

        await self.parts.add(Part(name, needs, start, supervise, f"supervising {name}", stop, **options))

    async def wait_for(self, event: str) -> None:
        async with asyncio.timeout(60):
            while event not in self.events:  # noqa: ASYNC110 - a list has no event to wait for
                await asyncio.sleep(0.001)


async def test_a_part_stops_after_the_parts_that_need_it() -> None:
    world = RecordingParts()
    await world.add("vllm")
    await world.add("engine", "vllm")
    await world.add("api", "engine")
    await world.add("api-1", "engine")
    world.events.clear()
    world.may_stop["api"].clear()
    stopping = asyncio.create_task(world.parts.stop())
    await world.wait_for("api-1 has stopped")
    assert "engine stops" not in world.events, "an API process still runs"
    assert "api stops" in world.events, "the two API processes do not wait for each other"
    world.may_stop["api"].set()
    await stopping
    stops = [event for event in world.events if event.endswith(" stops")]
    assert stops[2:] == ["engine stops", "vllm stops"]
    assert world.events.index("engine is not supervised") < world.events.index("vllm stops")
    assert world.events.index("vllm stops") < world.events.index("vllm is not supervised"), (
        "vllm is supervised until it is told to stop"
    )
    assert world.parts.names == []


async def test_the_other_parts_stop_although_one_fails_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    world = RecordingParts()
    await world.add("vllm")

    async def fails() -> None:
        raise ProcessLookupError

    await world.parts.add(Part("engine", ("vllm",), stop=fails))
    await world.parts.stop()
    assert "vllm has stopped" in world.events
    assert "stopping engine failed" in caplog.text


async def test_parts_can_be_added_and_removed_while_others_run(caplog: pytest.LogCaptureFixture) -> None:
    world = RecordingParts()
    await world.add("vllm")
    ending = asyncio.create_task(world.parts.until_one_ends())
    with pytest.raises(ValueError, match="^watch needs vllm-1$"):
        await world.add("watch", "vllm-1")
    await world.add("vllm-1")
    with pytest.raises(ValueError, match="there is a part vllm-1 already"):
        await world.add("vllm-1")
    await world.add("watch", "vllm-1")
    with pytest.raises(ValueError, match="^watch needs vllm-1$"):
        await world.parts.remove("vllm-1")
    await world.parts.remove("watch")
    await world.parts.remove("vllm-1")
    assert world.parts.names == ["vllm"]
    assert not ending.done(), "removing a part does not end the server"
    await world.add("vllm-1")
    world.may_end["vllm-1"].set_exception(OSError("no room"))
    with pytest.raises(ServerEnded, match="^the server has stopped because supervising vllm-1 ended: no room$"):
        await ending
    assert [record.message for record in caplog.records if record.exc_info] == ["supervising vllm-1 failed"]
    await world.parts.stop()


async def test_dropped_parts_stop_in_order_and_those_that_need_them_run_on() -> None:
    world = RecordingParts()
    for name, *needs in (
        ("vllm",),
        ("vllm-b",),
        ("engine", "vllm"),
        ("engine-b", "vllm-b"),
        ("api", "engine", "engine-b"),
    ):
        await world.add(name, *needs)
    ending = asyncio.create_task(world.parts.until_one_ends())
    world.events.clear()
    await world.parts.drop(["vllm-b", "engine-b"])
    assert [event for event in world.events if event.endswith("has stopped")] == [
        "engine-b has stopped",
        "vllm-b has stopped",
    ]
    assert world.parts.names == ["vllm", "engine", "api"]
    assert not ending.done()
    world.events.clear()
    await world.parts.stop()
    assert [event for event in world.events if event.endswith("has stopped")] == [
        f"{name} has stopped" for name in ("api", "engine", "vllm")
    ]
    ending.cancel()


async def test_a_server_stops_while_parts_are_being_dropped() -> None:
    world = RecordingParts()
    await world.add("vllm")
    await world.add("engine", "vllm")
    world.may_stop["vllm"].clear()
    dropping = asyncio.create_task(world.parts.drop(["vllm"]))
    await world.wait_for("vllm stops")
    stopping = asyncio.create_task(world.parts.stop())
    await world.wait_for("engine has stopped")
    world.may_stop["vllm"].set()
    await asyncio.gather(dropping, stopping)
    assert world.parts.names == []


async def test_the_server_ends_when_the_supervision_of_a_part_returns() -> None:
    world = RecordingParts()
    await world.add("vllm")
    world.may_end["vllm"].set_result(None)
    with pytest.raises(ServerEnded, match="see above"):
        await world.parts.until_one_ends()
    await world.parts.stop()
    assert "vllm has stopped" in world.events, "the part whose supervision ended is stopped too"


async def test_a_part_that_fails_to_start_is_not_added() -> None:
    world = RecordingParts()

    async def fails() -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        await world.parts.add(Part("vllm", start=fails))
    assert world.parts.names == []
    await world.add("vllm")
    await world.parts.stop()


async def test_the_longest_stop_is_the_sum_over_parts_that_stop_one_after_another() -> None:
    world = RecordingParts()
    await world.add("vllm", grace_s=5.0)
    await world.add("engine", "vllm", grace_s=20.0)
    await world.add("api", "engine", grace_s=15.0)
    await world.add("api-1", "engine", grace_s=15.0)
    assert world.parts.grace_s == 40.0
    await world.parts.stop()
