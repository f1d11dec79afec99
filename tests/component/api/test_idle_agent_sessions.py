"""Which agent sessions are idle: none with a turn that runs, and none that another API process has answered. Those that
are idle, or too old, are ended and counted."""

from __future__ import annotations

import time

from api_harness import BASE, Api, scrape

from skyrl.api.access import tenant_of_key
from skyrl.base.types.agents import AgentLimits, AgentSession
from skyrl.base.types.weights import BaseWeights
from skyrl.chat.agents.live_sessions import LiveSession, RunningTurn
from skyrl.storage.db.database import MAX_NAMED
from tests.postgres_server import ON_BOTH, ON_POSTGRES

LONG_S = 1_000.0


async def opened(api: Api) -> LiveSession:
    answer = await api.post("agent_sessions", {"model": BASE, "limits": {"idle_s": LONG_S / 2}})
    return await api.services.agents.live.open(answer.json()["session_id"], tenant_of_key("tml-one"))


async def create(api: Api, session_id: str, *, created_at: float, used_at: float) -> None:
    session = AgentSession(
        id=session_id,
        tenant="one",
        name="",
        model=BASE,
        base_model=BASE,
        weights=BaseWeights(),
        follows="pinned",
        limits=AgentLimits(turns=9, tokens=9, seconds=LONG_S / 2, idle_s=LONG_S / 2),
        created_at=created_at,
        used_at=used_at,
    )
    assert await api.services.agent_sessions.create(session, 10 * MAX_NAMED)


async def used_at(api: Api, live: LiveSession) -> float:
    await api.services.agent_sessions.write_uses()
    found = await api.services.agent_sessions.find(live.session.id)
    assert found is not None
    assert found.end_reason is None
    return found.used_at


@ON_BOTH
async def test_a_session_is_in_use_while_its_turn_runs(api: Api) -> None:
    live = await opened(api)
    await used_at(api, live)
    live.used_at = time.time() - LONG_S
    before = time.time()
    await api.services.agents.live.note_running()
    assert await used_at(api, live) < before, "no turn runs"
    turn = RunningTurn("t1", None, tokens=1, n=1, streams=False)
    live.running.append(turn)
    await api.services.agents.live.note_running()
    live.running.remove(turn)
    assert await used_at(api, live) >= before
    assert live.used_at >= before, "the next request comes after the turn, not after its beginning"


@ON_POSTGRES
async def test_an_answer_of_another_process_counts_as_use(api: Api) -> None:
    live = await opened(api)
    await used_at(api, live)  # as another process writes it
    live.used_at = time.time() - LONG_S
    await api.services.agents.live.open(live.session.id, live.session.tenant)
    await used_at(api, live)


@ON_BOTH
async def test_sessions_that_end_unasked_are_counted_once_by_reason(api: Api) -> None:
    now, old = time.time(), MAX_NAMED + 3
    for number in range(old):
        await create(api, f"old{number}", created_at=now - LONG_S, used_at=now)
    await create(api, "idle", created_at=now, used_at=now - LONG_S)
    await create(api, "open", created_at=now, used_at=now)
    before = await scrape(api)
    for _ in range(2):
        await api.services.agents.live.end_over()
    after = await scrape(api)
    counted = {
        name: after[name] - before[name] for name in after if name.startswith("skyrl_agent_sessions_ended_total")
    }
    by_reason = {name.partition("reason=")[2].rstrip("}"): number for name, number in counted.items() if number}
    assert by_reason == {"time": old, "idle": 1}
    left, _ = await api.services.agent_sessions.page("one", 9, 0, "open")
    assert [session.id for session, _ in left] == ["open"]
