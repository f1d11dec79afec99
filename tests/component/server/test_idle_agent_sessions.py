"""Which agent sessions are idle: none with a turn that runs, and none that another API process has answered."""

from __future__ import annotations

import time

from api_harness import BASE, Api

from skyrl.server.agents.live import LiveSession
from skyrl.server.agents.running import RunningTurn
from skyrl.server.api.tokens import tenant_of_key
from tests.postgres_server import ON_BOTH, ON_POSTGRES

LONG_S = 1_000.0


async def opened(api: Api) -> LiveSession:
    answer = await api.post("agent_sessions", {"model": BASE, "limits": {"idle_s": LONG_S / 2}})
    return await api.services.agents.live.open(answer.json()["session_id"], tenant_of_key("tml-one"))


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
