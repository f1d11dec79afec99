"""Checkpoints are found by type, owner, project, base model and metadata, newest first, page by page."""

from __future__ import annotations

from typing import Any

from checkpoint_world import KEY, OTHER, World, rest_path

from skyrl.api.access import tenant_of_key, user_urn
from skyrl.base.types.requests import Kind


async def search(world: World, key: str = KEY, **query: Any) -> dict[str, Any]:
    return await world.post("checkpoints/search", query, key)


async def names(world: World, key: str = KEY, **query: Any) -> list[str]:
    return [found["checkpoint_id"] for found in (await search(world, key, **query))["checkpoints"]]


async def test_a_search_finds_what_the_caller_may_read_and_asks_for(world: World) -> None:
    mine, theirs = await world.trainer(), await world.trainer(OTHER)
    await mine.do(Kind.SAVE_WEIGHTS, path="a", user_metadata={"step": "1", "run": "x"})
    await mine.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="b", user_metadata={"step": "1"})
    await mine.do(Kind.SAVE_WEIGHTS_EXTERNAL, path="c")
    for name in ("d", "e"):
        await theirs.do(Kind.SAVE_WEIGHTS, path=name)
    await world.post(rest_path(f"tinker://{theirs.model_id}/weights/d") + "/publish", {}, OTHER)
    session = mine.model_id.partition(":")[0]
    assert (await world.ask("PUT", f"sessions/{session}/project", {"project_id": "p"})).status_code == 200

    own = ["external_weights/c", "sampler_weights/b", "weights/a"]
    owner_is_other = {"type": "user", "owner_urns": [user_urn(tenant_of_key(OTHER)), "tml:org:1"]}
    queries: list[tuple[dict[str, Any], list[str]]] = [
        ({}, own),
        ({"owner": {"type": "own"}}, own),
        ({"checkpoint_type": "sampler"}, ["sampler_weights/b"]),
        ({"user_metadata": {"step": "1"}}, ["sampler_weights/b", "weights/a"]),
        ({"user_metadata": {"step": "1", "run": "x"}}, ["weights/a"]),
        ({"project_ids": ["p"]}, own),
        ({"project_ids": ["default"]}, []),
        ({"project_ids": []}, []),
        ({"base_models": ["tiny"]}, own),
        ({"base_models": ["another", "tiny"]}, own),
        ({"base_models": ["another"]}, []),
        ({"base_models": []}, []),
        ({"owner": {"type": "accessible"}}, ["weights/d", *own]),
        ({"owner": {"type": "accessible"}, "project_ids": ["p"]}, own),
        ({"owner": owner_is_other}, ["weights/d"]),
        ({"owner": {"type": "user", "owner_urns": ["tml:org:1"]}}, []),
    ]
    for query, expected in queries:
        assert await names(world, **query) == expected, query
    first = (await search(world))["checkpoints"][0]
    assert (first["base_model"], first["checkpoint_type"]) == ("tiny", "external")
    listed = (await world.get("checkpoints"))["checkpoints"]
    assert [each["base_model"] for each in listed] == ["tiny"] * 3
    assert await names(world, OTHER, owner={"type": "own"}) == ["weights/e", "weights/d"]
    answer = await world.ask("POST", "checkpoints/search", {}, **{"X-Stainless-Package-Version": "0.25.0"})
    assert [each["checkpoint_id"] for each in answer.json()["checkpoints"]] == own[1:], "an old SDK knows no exports"


async def test_pages_join_without_gap_and_without_repetition(world: World) -> None:
    trainer = await world.trainer()
    for number in range(5):
        await trainer.do(Kind.SAVE_WEIGHTS, path=f"n{number}")
    found: list[str] = []
    cursor = None
    for size in (2, 2, 1):
        page = await search(world, limit=2, cursor=cursor)
        assert len(page["checkpoints"]) == size
        found += [each["checkpoint_id"] for each in page["checkpoints"]]
        cursor = page["next_cursor"]
        if size == 2 and len(found) == 2:  # a newer checkpoint comes before the pages that are still to be read
            await trainer.do(Kind.SAVE_WEIGHTS, path="later")
    assert cursor is None
    assert found == [f"weights/n{number}" for number in (4, 3, 2, 1, 0)]
