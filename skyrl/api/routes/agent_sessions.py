"""Agent sessions for their tenant: make them, look at them, end, reward and delete them, and read their turns."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import asdict
from typing import Any, Literal

import msgspec
from fastapi import Query
from starlette.responses import Response

from skyrl.api.call import Call, reply
from skyrl.api.routing import API, Routes
from skyrl.api.services import Services
from skyrl.base.config.keys import AgentsConfig
from skyrl.base.types.agents import AgentLimits, AgentSession
from skyrl.base.types.requests import new_request_id
from skyrl.base.wire.errors import NotFound, RequestError
from skyrl.base.wire.requests import check_metadata
from skyrl.chat.agents.export import About, Experts, PageStart, page_of_rows, page_of_turns
from skyrl.chat.agents.rendering.loaded_models import Habits
from skyrl.chat.openai.errors import OpenAIError
from skyrl.chat.openai.fields import ChatFields
from skyrl.storage.db.agents import Counts, SessionState
from skyrl.storage.shares import ROW_BYTES

ROUTE = f"{API}/agent_sessions"
MAX_PAGE, MAX_ROWS = 200, 64
MAX_NAME = 200
_SET_BY_REQUESTS = frozenset({"messages", "model", "stream", "stream_options", "tools"})


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    turns: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    idle_s: float | None = None


class CreateAgentSession(msgspec.Struct):
    """See `skyrl.base.types.agents.AgentSession`. `thinking` says what becomes of the thoughts of earlier answers:
    with `template` a turn forks where the client or the model's template drops them, with `keep` it goes on.
    `keep_thinking` is an older name for `keep`."""

    model: str
    name: str = ""
    follows: Literal["pinned", "newest"] = "pinned"
    limits: Limits = msgspec.field(default_factory=Limits)
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    thinking: Literal["template", "keep"] | None = None
    keep_thinking: bool = False
    routed_experts: bool = False


class Reward(msgspec.Struct):
    reward: float


def agent_session_routes(services: Services) -> Routes:
    routes = Routes("agent sessions", ROUTE)
    sessions, bounds = services.agent_sessions, services.config.agents

    @routes.post("", scope="sample", body=CreateAgentSession)
    async def create(call: Call, body: CreateAgentSession) -> Response:
        """A session, and the key with which an agent asks for its turns."""
        _check(body)
        services.shares.check(call.tenant)
        try:
            target = await services.openai_models.newest(body.model, call.tenant)
        except OpenAIError as error:  # whose message does not begin with the field
            raise RequestError(error.message, field=error.field, status=error.status) from error
        if services.served[target.number].openai is None:
            raise RequestError("this server samples between two turns of training and has no agent sessions")
        habits = await services.agent_continuations.habits(target.number)
        now = time.time()
        session = AgentSession(
            id=new_request_id(),
            tenant=call.tenant,
            name=body.name,
            model=body.model,
            base_model=target.base_model,
            weights=target.weights,
            follows=body.follows,
            limits=_limits(body.limits, bounds),
            created_at=now,
            used_at=now,
            sampling=_with_switches(body.sampling, habits),
            metadata=body.metadata,
            keep_thinking=body.keep_thinking or body.thinking == "keep",
            routed_experts=body.routed_experts,
        )
        if not await sessions.create(session, bounds.sessions):
            raise RequestError(f"there are {bounds.sessions} open agent sessions; end some of them", status=429)
        services.shares.keep_agents(call.tenant, len(call.body) + ROW_BYTES)
        key = services.tokens.agent_keys.issue(session.id, session.tenant)
        origin = services.config.public_url or str(call.request.base_url)
        created = {"session_id": session.id, "key": key, "base_url": origin.rstrip("/")}
        return reply(created | {"thinking": session.thinking} | habits.description)

    @routes.get("", scope="sample")
    async def listed(
        call: Call,
        limit: int = Query(20, ge=1, le=MAX_PAGE),
        offset: int = Query(0, ge=0, lt=2**31),
        state: SessionState | None = None,
    ) -> Response:
        """The tenant's sessions, newest first."""
        page, total = await sessions.page(call.tenant, limit, offset, state)
        return reply({"sessions": [_shown(session, counts) for session, counts in page], "total": total})

    @routes.get("/{session_id}", scope="sample")
    async def one(call: Call, session_id: str) -> Response:
        session = await find(call, session_id)
        counts = await sessions.counts([session_id])
        return reply(_shown(session, counts.get(session_id, Counts())))

    @routes.post("/{session_id}/end", scope="sample")
    async def end(call: Call, session_id: str) -> Response:
        """A session that has ended already stays as it is."""
        await find(call, session_id)
        await services.agents.live.end(session_id, "called")
        return reply({})

    @routes.delete("/{session_id}", scope="sample")
    async def delete(call: Call, session_id: str) -> Response:
        """End a session, and forget it with its turns: nobody finds it any more."""
        await find(call, session_id)
        await services.agents.live.end(session_id, "called")
        await sessions.delete(session_id)
        return reply({})

    @routes.post("/{session_id}/reward", scope="sample", body=Reward)
    async def reward(call: Call, body: Reward, session_id: str) -> Response:
        """In place of an earlier reward."""
        if not math.isfinite(body.reward):
            raise RequestError("must be finite", field="reward")
        if not await sessions.reward(session_id, call.tenant, body.reward):
            raise _unknown()
        return reply({})

    @routes.get("/{session_id}/trajectory", scope="sample")
    async def trajectory(
        call: Call,
        session_id: str,
        format: Literal["datums", "samples", "verl", "jsonl"] = "datums",
        advantage: float | None = None,
        offset: str = "0",
        limit: int = Query(MAX_ROWS, ge=1, le=MAX_ROWS),
    ) -> Response:
        """Rows to train on. `advantage` is that of each trained token; the reward if it is not given. `offset` is the
        `next_offset` of the page before."""
        start, session = PageStart.read(offset), await find(call, session_id)
        if format == "jsonl":
            return reply(await page_of(session, start, limit))
        turns, _ = await services.agent_turns.of(session_id)
        given = advantage if advantage is not None else session.reward or 0.0
        if not math.isfinite(given):
            raise RequestError("must be finite", field="advantage")

        def page() -> dict[str, Any]:
            model = services.served.of(session.base_model).config.base_model_path
            about = About(session, given, Experts.of(model) if session.routed_experts else None)
            return page_of_rows(turns, about, format, start, limit)

        return reply(await asyncio.to_thread(page))

    @routes.get("/{session_id}/turns", scope="sample")
    async def turns(
        call: Call,
        session_id: str,
        offset: str = "0",
        limit: int = Query(MAX_ROWS, ge=1, le=MAX_ROWS),
    ) -> Response:
        """The turns in the order in which they ended. `offset` is the `next_offset` of the page before."""
        start = PageStart.read(offset)
        return reply(await page_of(await find(call, session_id), start, limit))

    async def page_of(session: AgentSession, start: PageStart, limit: int) -> dict[str, Any]:
        turns, _ = await services.agent_turns.of(session.id)
        is_open = session.ended_at is None
        return await asyncio.to_thread(page_of_turns, turns, start, limit, is_open=is_open)

    async def find(call: Call, session_id: str) -> AgentSession:
        """A session whose time is over is unknown at once: its turns are deleted in steps, and a part of them is no
        trajectory."""
        session = await sessions.find(session_id)
        if session is None or session.tenant != call.tenant:
            raise _unknown()
        if session.ended_at is not None and session.ended_at + bounds.retention_s < time.time():
            raise _unknown()
        return session

    return routes


def _check(body: CreateAgentSession) -> None:
    """Raises RequestError naming the field."""
    if len(body.name) > MAX_NAME:
        raise RequestError(f"must have at most {MAX_NAME} characters", field="name")
    if body.keep_thinking and body.thinking == "template":
        raise RequestError('contradicts thinking: "template"', field="keep_thinking")
    check_metadata("metadata", body.metadata)
    check_metadata("sampling", body.sampling)
    known = set(ChatFields.__struct_fields__) - _SET_BY_REQUESTS
    if unknown := sorted(body.sampling.keys() - known):
        raise RequestError("is not a field that a session can set", field=f"sampling.{unknown[0]}")
    try:
        msgspec.convert({**body.sampling, "model": "", "messages": []}, ChatFields)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        raise RequestError(problem, field=f"sampling{path.rstrip('`')}") from error


def _with_switches(sampling: dict[str, Any], habits: Habits) -> dict[str, Any]:
    """The session's own fields, with the switches of the template with which its turns can be continued."""
    if not habits.switches:
        return sampling
    return sampling | {"chat_template_kwargs": habits.switches | (sampling.get("chat_template_kwargs") or {})}


def _limits(asked: Limits, bounds: AgentsConfig) -> AgentLimits:
    """Raises RequestError naming the limit that is out of bounds."""
    found: dict[str, Any] = {}
    for name in Limits.__struct_fields__:
        most, value = getattr(bounds, name), getattr(asked, name)
        if value is not None and not 0 < value <= most:
            raise RequestError(f"must be above 0 and at most {most:g}", field=f"limits.{name}")
        found[name] = most if value is None else value
    return AgentLimits(**found)


def _shown(session: AgentSession, counts: Counts) -> dict[str, Any]:
    hidden = ("tenant", "weights", "keep_thinking")
    fields = {name: value for name, value in asdict(session).items() if name not in hidden}
    fields["thinking"] = session.thinking
    state = "open" if session.ended_at is None else "ended"
    return fields | {"session_id": fields.pop("id"), "weights": str(session.weights), "state": state} | asdict(counts)


def _unknown() -> NotFound:
    return NotFound("no such agent session", field="session_id")
