"""Rows about agent sessions: what a turn costs beside a plain chat completion, and what the prefix cache finds.

Both rows have the real vLLM behind the server. A conversation has TURNS turns; the plain client sends all its messages
as a session's does, so that the two differ in the session alone. They take turns, round by round.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.stage import Stage, ready_server
from benchmarks.table import Row, Target
from skyrl.base.tiny import tools
from skyrl.cli.demo.server import DemoServer

TENANT = {"X-API-Key": "tml-agents"}
TURNS, TOKENS = 8, 4
ROUNDS, QUICK_ROUNDS = 12, 3
ADDED_MS, ADDED_SHARE = 1.0, 1.10
LONG_TURNS, REPLICAS, TRAJECTORIES = 30, 2, 6
FIRST_WORDS, CONTEXT = 250, 32_768
"""An agent's first message has some 13,000 tokens: instructions and tools. Here it repeats WORDS as often."""
CACHED = 0.95
WORDS = "the river is watched by an old keeper who counts the boats and writes each of them into a book"


def compare(stage: Stage) -> list[Row]:
    """ "direct" is a plain chat completion."""
    return asyncio.run(_compare(QUICK_ROUNDS if stage.quick else ROUNDS))


async def _compare(rounds: int) -> list[Row]:
    with ready_server() as server:
        rows = [await _added(server, in_flight, rounds) for in_flight in (1, 64)]
    return [*rows, await _cached()]


async def _added(server: DemoServer, in_flight: int, rounds: int) -> Row:
    """The median latency of a turn: of sessions, and of plain conversations, `in_flight` of them at once."""
    plain, session = list[float](), list[float]()
    async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as http:
        for number in range(rounds + 1):
            ways = [(_plain, plain), (_session, session)]
            for make, seconds in ways if number % 2 == 0 else ways[::-1]:
                keys = [await make(http) for _ in range(in_flight)]
                taken = await asyncio.gather(
                    *(_conversation(http, key, TURNS, f"{number}-{k}") for k, key in enumerate(keys))
                )
                if number:  # the first round warms up
                    seconds += [each for of_one in taken for each, _ in of_one]
    ours, direct = 1e3 * statistics.median(session), 1e3 * statistics.median(plain)
    what = f"p50 of an agent session's turn, {in_flight} in flight"
    bound = direct + ADDED_MS if in_flight == 1 else direct * ADDED_SHARE
    return Row("agent-sessions", what, "ms", ours, Target(bound), direct, note=f"{len(session)} turns of each")


async def _plain(http: aiohttp.ClientSession) -> dict[str, str]:
    return TENANT


async def _session(http: aiohttp.ClientSession) -> dict[str, str]:
    async with http.post("/api/v1/agent_sessions", json={"model": "tiny"}, headers=TENANT) as answer:
        answer.raise_for_status()
        return {"Authorization": f"Bearer {(await answer.json())['key']}"}


async def _conversation(
    http: aiohttp.ClientSession, headers: dict[str, str], turns: int, name: str, first: int = 1
) -> list[tuple[float, dict[str, Any]]]:
    """Seconds and usage of each turn. The first message has WORDS `first` times."""
    messages = [{"role": "user", "content": f"{name}: {first * WORDS}"}]
    taken = []
    for number in range(turns):
        body = {"model": "tiny", "messages": messages, "max_tokens": TOKENS, "ignore_eos": True}
        began = time.perf_counter()
        async with http.post("/v1/chat/completions", json=body, headers=headers) as answer:
            content = await answer.json()
            assert answer.status == 200, content
        taken.append((time.perf_counter() - began, content["usage"]))
        said = content["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"{number} {WORDS}"}]
    return taken


async def _cached() -> Row:
    """The share of all prompt tokens that came from the prefix cache, over sessions of LONG_TURNS turns at once."""
    config = {
        "generator.inference_engine.num_engines": REPLICAS,
        "generator.inference_engine.max_model_len": CONTEXT,
        "generator.inference_engine.engine_init_kwargs": {
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": 4096,
        },
    }
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "model")
        tools.make(model, CONTEXT)
        flags = ("--base-model", str(model), "--served-model-name", "tiny")
        connector = aiohttp.TCPConnector(limit=0)
        with ready_server(*flags, engine=config) as server:
            async with aiohttp.ClientSession(server.url, connector=connector) as http:
                await _all_replicas(http)
                keys = [await _session(http) for _ in range(TRAJECTORIES)]
                turns = [_conversation(http, key, LONG_TURNS, str(i), FIRST_WORDS) for i, key in enumerate(keys)]
                used = [usage for of_one in await asyncio.gather(*turns) for _, usage in of_one]
    share = _total(used, True) / _total(used, False)
    what = f"prompt tokens from the prefix cache, {LONG_TURNS} turns, {REPLICAS} replicas"
    note = f"{TRAJECTORIES} sessions at once; vLLM caches whole blocks"
    return Row("agent-sessions", what, "", share, Target(CACHED, at_most=False), note=note)


async def _all_replicas(http: aiohttp.ClientSession) -> None:
    """Wait for the last replica: the server is ready with the first, and a session moves when its replica comes."""
    while True:
        async with http.get("/statusz") as answer:
            status = await answer.json()
        if status["replicas"]["in_use"] == REPLICAS:
            return
        await asyncio.sleep(0.2)


def _total(used: Sequence[dict[str, Any]], cached: bool) -> int:
    return sum(usage["prompt_tokens_details"]["cached_tokens"] if cached else usage["prompt_tokens"] for usage in used)
