"""Parts of a server that need each other: in which order they stop, what stops with what, and who ends the server."""

from __future__ import annotations

import asyncio

import pytest

from skyrl.launcher.parts import Part, Parts, ServerEnded


class World:
    """Parts that note what happens to them."""

    def __init__(self) -> None:
        self.parts = Parts()
        self.said: list[str] = []
        self.may_stop: dict[str, asyncio.Event] = {}
        self.may_end: dict[str, asyncio.Future[None]] = {}

    async def add(self, name: str, *needs: str, **options: float) -> None:
        self.may_stop[name] = asyncio.Event()
        self.may_stop[name].set()
        self.may_end[name] = asyncio.get_running_loop().create_future()

        async def start() -> None:
            self.said.append(f"{name} starts")

        async def supervise() -> None:
            try:
                await self.may_end[name]
            finally:
                self.said.append(f"{name} is not supervised")

        async def stop() -> None:
            self.said.append(f"{name} stops")
            await self.may_stop[name].wait()
            if not self.may_end[name].done():
                self.may_end[name].set_result(None)  # as the supervision of a process returns when it is stopped
                await self.until_said(f"{name} is not supervised")
            self.said.append(f"{name} has stopped")

        await self.parts.add(Part(name, needs, start, supervise, f"supervising {name}", stop, **options))

    async def until_said(self, sentence: str) -> None:
        async with asyncio.timeout(60):
            while sentence not in self.said:  # noqa: ASYNC110 - whoever says it tells nobody
                await asyncio.sleep(0.001)


async def test_parts_stop_after_those_that_need_them() -> None:
    here = World()
    await here.add("vllm")
    await here.add("engine", "vllm")
    await here.add("api", "engine")
    await here.add("api-1", "engine")
    here.said.clear()
    here.may_stop["api"].clear()
    stopping = asyncio.create_task(here.parts.stop())
    await here.until_said("api-1 has stopped")
    assert "engine stops" not in here.said, "an API process still runs"
    assert "api stops" in here.said, "the two do not wait for each other"
    here.may_stop["api"].set()
    await stopping
    stops = [sentence for sentence in here.said if sentence.endswith(" stops")]
    assert stops[2:] == ["engine stops", "vllm stops"]
    assert here.said.index("engine is not supervised") < here.said.index("vllm stops")
    assert here.said.index("vllm stops") < here.said.index("vllm is not supervised"), "supervised until it stops"
    assert here.parts.names == []


async def test_a_part_that_cannot_be_stopped_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    here = World()
    await here.add("vllm")

    async def fails() -> None:
        raise ProcessLookupError

    await here.parts.add(Part("engine", ("vllm",), stop=fails))
    await here.parts.stop()
    assert "vllm has stopped" in here.said
    assert "stopping engine failed" in caplog.text


async def test_parts_come_and_go_while_others_run() -> None:
    here = World()
    await here.add("vllm")
    ending = asyncio.create_task(here.parts.until_one_ends())
    with pytest.raises(ValueError, match="^watch needs vllm-1$"):
        await here.add("watch", "vllm-1")
    await here.add("vllm-1")
    with pytest.raises(ValueError, match="there is a part vllm-1 already"):
        await here.add("vllm-1")
    await here.add("watch", "vllm-1")
    with pytest.raises(ValueError, match="^watch needs vllm-1$"):
        await here.parts.remove("vllm-1")
    await here.parts.remove("watch")
    await here.parts.remove("vllm-1")
    assert here.parts.names == ["vllm"]
    assert not ending.done(), "parts that are removed end nothing"
    await here.add("vllm-1")
    here.may_end["vllm-1"].set_exception(OSError("no room"))
    with pytest.raises(ServerEnded, match="^the server has stopped because supervising vllm-1 ended: no room$"):
        await ending
    await here.parts.stop()


async def test_a_supervision_that_returns_ends_the_server() -> None:
    here = World()
    await here.add("vllm")
    here.may_end["vllm"].set_result(None)
    with pytest.raises(ServerEnded, match="see above"):
        await here.parts.until_one_ends()
    await here.parts.stop()
    assert "vllm has stopped" in here.said, "it is stopped all the same"


async def test_a_part_that_cannot_start_is_not_there() -> None:
    here = World()

    async def fails() -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        await here.parts.add(Part("vllm", start=fails))
    assert here.parts.names == []
    await here.add("vllm")
    await here.parts.stop()


async def test_the_longest_stop_is_that_of_the_parts_that_stop_one_after_the_other() -> None:
    here = World()
    await here.add("vllm", grace_s=5.0)
    await here.add("engine", "vllm", grace_s=20.0)
    await here.add("api", "engine", grace_s=15.0)
    await here.add("api-1", "engine", grace_s=15.0)
    assert here.parts.grace_s == 40.0
    await here.parts.stop()
