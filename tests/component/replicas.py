"""Scripted inference servers, as an engine's group sees them: they load and unload adapters and say how they are."""

from __future__ import annotations

from adapter_hosts import AllThere
from fake_upstream import COMPLETIONS, LOAD, FakeUpstream, Reply, hang_up, reply

from skyrl.inference.adapter_host import AdapterHost
from skyrl.inference.engine_group import EngineGroup

UNLOAD = "/v1/unload_lora_adapter"
SOON_S = 0.01
WELL, ILL, GONE = reply(200, b""), reply(503, b""), hang_up


def set_up(upstream: FakeUpstream, health: Reply = WELL) -> None:
    """What it answers from now on; it takes every adapter."""
    upstream.controls = {
        "/health": health,
        "/is_sleeping": reply(200, {"is_sleeping": False}),
        COMPLETIONS: WELL,
        LOAD: WELL,
        UNLOAD: WELL,
    }


def group_of(
    *urls: str, host: AdapterHost | None = None, proxy_url: str | None = None, watching_s: float = SOON_S
) -> tuple[EngineGroup, list[str | None]]:
    """A group that looks often, not run yet; and what it publishes."""
    published: list[str | None] = []

    async def publish(url: str | None) -> None:
        published.append(url)

    group = EngineGroup(
        urls,
        "key",
        publish,
        host or AllThere(),
        proxy_url=proxy_url,
        starting_interval_s=SOON_S,
        watching_interval_s=watching_s,
    )
    return group, published
