"""When the inference URL is published and when it is withdrawn: a scripted server that is well, ill or gone."""

from __future__ import annotations

import asyncio

import pytest
from engine_harness import until
from fake_upstream import COMPLETIONS, FakeUpstream, Reply, fake_upstream, hang_up, reply

from skyrl.inference.engine_group import EngineGroup

SOON_S = 0.01
WELL, ILL, GONE = reply(200, b""), reply(503, b""), hang_up


def set_up(upstream: FakeUpstream, health: Reply) -> None:
    upstream.controls = {"/health": health, "/is_sleeping": reply(200, {"is_sleeping": False}), COMPLETIONS: WELL}


@pytest.mark.parametrize("health", [ILL, GONE], ids=["its engine is dead", "nobody answers"])
async def test_death_is_published_and_so_is_the_next_server(health: Reply) -> None:
    published: list[str | None] = []
    async with fake_upstream() as upstream:
        set_up(upstream, WELL)
        group = EngineGroup(
            [upstream.url], "key", published.append, starting_interval_s=SOON_S, watching_interval_s=SOON_S
        )
        watching = asyncio.create_task(group.run())
        await until(lambda: group.ready)
        assert published == [upstream.url]
        warm_ups = len(upstream.completions)
        set_up(upstream, health)
        await until(lambda: not group.ready)
        assert published == [upstream.url, None]
        assert "not healthy" in group.reason
        set_up(upstream, WELL)
        await until(lambda: group.ready)
        assert published == [upstream.url, None, upstream.url]
        assert len(upstream.completions) == 2 * warm_ups, "the next one was warmed up, too"
        await group.close()
        await watching
        assert published[-1] is None
