"""What every medium of new weights promises, as one test for fakes and for real servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from skyrl.weights.protocol import Medium, OutOfOrder, WeightUpdate, publish


@dataclass(frozen=True)
class World:
    """A medium and the servers behind it. `versions` are three that are not served yet. `parts` gives the parts of a
    version, `wrong` parts that make the update fail. `served`: the versions that can be sampled now, of each server."""

    medium: Medium[Any, Any]
    versions: Sequence[Any]
    parts: Callable[[Any], list[Any]]
    wrong: Callable[[Any], list[Any]]
    served: Callable[[], Awaitable[list[Any]]]


async def check(world: World) -> None:
    first, second, third = world.versions
    before = await world.served()
    await _moves_at_the_end_alone(world, first, before)
    moved = await world.served()
    await _given_up(world, second, moved)
    await _wrong_order(world, second)
    await _fails(world, third, moved)
    await publish(world.medium, third, world.parts(third))
    assert all(third in served for served in await world.served())


async def _moves_at_the_end_alone(world: World, version: Any, before: list[Any]) -> None:
    update = WeightUpdate(world.medium)
    await update.begin(version)
    for part in world.parts(version):
        await update.send(part)
        assert await world.served() == before
    await update.finish()
    assert all(version in served for served in await world.served())
    with pytest.raises(OutOfOrder):
        await update.send(world.parts(version)[0])


async def _given_up(world: World, version: Any, before: list[Any]) -> None:
    update = WeightUpdate(world.medium)
    await update.begin(version)
    await update.send(world.parts(version)[0])
    await update.abandon()
    await update.abandon()
    assert await world.served() == before

    def parts() -> Iterator[Any]:
        yield world.parts(version)[0]
        raise LookupError("on purpose")

    with pytest.raises(LookupError):
        await publish(world.medium, version, parts())
    assert await world.served() == before


async def _wrong_order(world: World, version: Any) -> None:
    for call in ("send", "finish"):
        update = WeightUpdate(world.medium)
        with pytest.raises(OutOfOrder, match=f"{call}: the update is new"):
            await (update.send(world.parts(version)[0]) if call == "send" else update.finish())
    update = WeightUpdate(world.medium)
    await update.begin(version)
    with pytest.raises(OutOfOrder):
        await update.begin(version)
    await update.abandon()


async def _fails(world: World, version: Any, before: list[Any]) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        await publish(world.medium, version, world.wrong(version))
    assert await world.served() == before
