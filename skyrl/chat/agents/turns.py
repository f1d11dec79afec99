"""An agent's request, from its place in the session's tree to its stored turn.

Knows sessions, trees and OpenAI's chat completions; knows neither dialects nor HTTP. The end of an answer is held back
until the turn is in the database. A client that asks a second time gets the stored answer as a chat completion again,
whole or as chunks. `TurnSpan` is the span of a turn whose request is traced, a child of the request's span and the
parent of `forward`: it has counts and reasons, and neither messages nor tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextvars import Token
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from skyrl.base.types.agents import AgentTurn, ForkReason, VersionSpan
from skyrl.base.types.weights import AdapterVersion, BaseWeights
from skyrl.base.wire.errors import RequestError
from skyrl.chat.agents.answers import Answers, bare
from skyrl.chat.agents.live_sessions import AgentMetrics, LiveSession, LiveSessions, RunningTurn
from skyrl.chat.agents.planning import Plan, Planner, TurnRequest
from skyrl.chat.agents.tree import request_key
from skyrl.chat.openai.errors import OpenAIError
from skyrl.chat.openai.models import Target
from skyrl.runtime.processes.logs import about_request
from skyrl.runtime.tracing import Attribute, OpenSpan, RequestTrace, current_trace
from skyrl.sampling.completion import MalformedAnswer
from skyrl.storage.db.agents import AgentTurns
from skyrl.storage.shares import DiskShares


class TurnSpan:
    """While it is entered, the spans of this task are the turn's children. The turn began `own_s` (seconds) ago: that
    time went into its place and its tokens."""

    def __init__(self, session_id: str, turn_id: str, own_s: float) -> None:
        self._about: dict[str, Attribute] = {
            "skyrl.agent_session_id": session_id,
            "skyrl.turn_id": turn_id,
            "skyrl.own_s": own_s,
        }
        self._own_s = own_s
        self._open: tuple[OpenSpan, Token[RequestTrace | None]] | None = None

    def __enter__(self) -> TurnSpan:
        if (trace := current_trace.get()) is not None:
            span = trace.child("turn", start_ns=time.time_ns() - int(self._own_s * 1e9))
            self._open = span, current_trace.set(trace.within(span))
        return self

    def answered(self, turns: Sequence[AgentTurn]) -> None:
        """The answer is complete: its turns, one for each choice."""
        first = turns[0]
        self._about |= {
            "skyrl.dialect": first.dialect,
            "skyrl.prompt_tokens": first.usage["prompt"],
            "skyrl.cached_tokens": first.usage["cached"],
            "skyrl.added_tokens": len(first.added),
            "skyrl.sampled_tokens": sum(len(turn.sampled) for turn in turns),
        }
        if first.fork is not None:
            self._about["skyrl.fork"] = first.fork
        if first.forked_at is not None:
            self._about["skyrl.forked_at"] = first.forked_at

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._open is not None:
            span, token = self._open
            current_trace.reset(token)
            span.end(self._about, None if kind is None else kind.__name__)


COMPLETION_ID = "chatcmpl-"


def repeated(turns: Sequence[AgentTurn], n: int) -> RunningTurn:
    """The last `n` answers to a request, as a turn that has ended."""
    turn = RunningTurn(turns[-n:][0].id, None, tokens=0, n=n, streams=False)
    turn.end(turns[-n:], None)
    return turn


def whole_again(turns: Sequence[AgentTurn], model: str) -> bytes:
    """A chat completion without logprobs: the texts of the tokens are not stored."""
    choices = [
        {
            "index": index,
            "message": turn.answer,
            "logprobs": None,
            "finish_reason": turn.finish_reason,
            "stop_reason": turn.stop_reason,
        }
        for index, turn in enumerate(turns)
    ]
    head = _head(turns, model) | {"object": "chat.completion"}
    return msgspec.json.encode(head | {"choices": choices, "usage": _usage(turns)})


def chunks_again(turns: Sequence[AgentTurn], model: str) -> list[bytes]:
    """The same as a stream."""
    head = _head(turns, model) | {"object": "chat.completion.chunk"}
    parts: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        delta = dict(turn.answer)
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{**call, "index": number} for number, call in enumerate(calls)]
        parts.append({"choices": [{"index": index, "delta": delta, "finish_reason": None}]})
        end = {"index": index, "delta": {}, "finish_reason": turn.finish_reason, "stop_reason": turn.stop_reason}
        parts.append({"choices": [end]})
    parts.append({"choices": [], "usage": _usage(turns)})
    return [msgspec.json.encode(head | part) for part in parts]


def _head(turns: Sequence[AgentTurn], model: str) -> dict[str, Any]:
    return {"id": f"{COMPLETION_ID}{turns[0].id}", "created": int(turns[0].created_at), "model": model}


def _usage(turns: Sequence[AgentTurn]) -> dict[str, Any]:
    prompt, cached = turns[0].usage["prompt"], turns[0].usage["cached"]
    sampled = sum(len(turn.sampled) for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


logger = logging.getLogger(__name__)


class TurnRunner:
    def __init__(
        self, live: LiveSessions, stored: AgentTurns, planner: Planner, metrics: AgentMetrics, shares: DiskShares
    ) -> None:
        self.live = live
        self._shares = shares
        self._stored = stored
        self._planner = planner
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def begin(self, request: TurnRequest) -> RunningTurn:
        """The turn that answers a request: a new one, or the one that has answered the same request before and did not
        reach its client. Raises RequestError."""
        if self._stopping:
            raise _stopping()
        try:
            return await self._begun(request)
        except RequestError as error:
            self._metrics.failed(request.dialect, error.status)
            raise

    async def _begun(self, request: TurnRequest) -> RunningTurn:
        began = time.perf_counter()
        live = await self.live.open(request.session_id, request.tenant)
        live.planned += 1  # inference servers may be asked, which may be away for long
        try:
            return await self._planned(live, request, began)
        finally:
            live.planned -= 1

    async def _planned(self, live: LiveSession, request: TurnRequest, began: float) -> RunningTurn:
        """The turn that answers a request, which came at `began` (`time.perf_counter`). Raises RequestError."""
        if request.chat.get("model") is None:
            request.chat["model"] = live.session.model
        place, fields = await self._planner.place(live, request)
        key = request_key(place.prefix, fields)
        running = live.running_with(key)
        if running is not None and (request.retried or running.left):
            self._metrics.repeated(request.dialect)
            return running
        answered = live.tree.answered(key)
        if answered and (request.retried or not live.was_delivered(answered[-1])):
            self._metrics.repeated(request.dialect)
            return repeated(answered, int(fields.get("n") or 1))
        live.check_open()
        self._shares.check(request.tenant)
        if request.retried and not self.live.alone:
            # Another process may be at this turn. Nothing is shown before it is known whose answer is stored.
            fields = fields | {"stream": False}
        plan = await self._planner.plan(live, request, place, fields)
        live.check_open()  # again: it may have ended while the turn was planned
        size = plan.generation.size
        tokens = size.n * ((size.max_tokens or 0) + _added(live, plan))
        turn = RunningTurn(request.turn_id, plan.parent, tokens=tokens, n=size.n, streams=plan.generation.stream)
        answered = live.tree.answered(key)  # again: another one may have ended while this one was planned
        attempt = len(answered) + sum(other.n for other in live.running if live.keys[other.id] == key)
        live.running.append(turn)
        live.keys[turn.id] = key
        own_s = time.perf_counter() - began
        task = turn.task = asyncio.create_task(self._run(turn, live, plan, key, attempt, own_s))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._task_ended(task, turn, live))
        return turn

    async def whole(self, turn: RunningTurn, request: TurnRequest) -> bytes:
        """The chat completion. Raises RequestError."""
        await turn.wait()
        return turn.body if turn.body is not None else whole_again(turn.turns, request.model)

    async def chunks(self, turn: RunningTurn, request: TurnRequest) -> AsyncGenerator[bytes, None]:
        """The chunks of the chat completion. After the last one has been taken, the answer counts as delivered. Raises
        RequestError."""
        if turn.streams:
            async for chunk in turn.chunks():
                yield chunk
        else:
            await turn.wait()
            for chunk in chunks_again(turn.turns, request.model):
                yield chunk

    def delivered(self, turn: RunningTurn, request: TurnRequest) -> None:
        """The client has got the whole answer."""
        if (live := self.live.peek(request.session_id)) is not None:
            live.delivered.update(each.id for each in turn.turns)

    async def count(self, request: TurnRequest) -> int:
        """How many tokens the prompt of a request has. Raises RequestError."""
        return await self._planner.count(await self.live.open(request.session_id, request.tenant), request)

    async def history(self, session_id: str, tenant: str, turn_id: str) -> list[dict[str, Any]] | None:
        """All messages up to the answer of a turn; None if the session has no such turn."""
        live = await self.live.open(session_id, tenant)
        turn = live.tree.get(turn_id)
        return None if turn is None else [*live.tree.messages_of(turn), turn.answer]

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait up to `grace_s` until running turns have ended, then end the others: their clients
        ask again."""
        self._stopping = True
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(
        self, turn: RunningTurn, live: LiveSession, plan: Plan, key: bytes, attempt: int, own_s: float
    ) -> None:
        """Sample the answer, store it, then let its end go. `own_s` (seconds) went into the plan."""
        began = time.time()
        answers = Answers(turn.n, plan.shown)
        request = plan.request
        try:
            with TurnSpan(live.session.id, turn.id, own_s) as span:
                held, body = await self._sampled(turn, answers, plan)
                turns = self._turns_of(turn, live, plan, answers, key, attempt, began)
                turn.is_complete = True
                span.answered(turns)
                stored = await self._store(turns, live)
            if [each.id for each in stored] != [each.id for each in turns]:
                if turn.streams:
                    raise OpenAIError("another process has answered this request; send it again", status=503)
                body = None
            before = live.tree.nbytes
            for each in stored:
                live.tree.add(each, live.session.keep_thinking)
            self._shares.keep_agents(live.session.tenant, live.tree.nbytes - before)  # a row takes about as much
            self._metrics.answered(turns, own_s)
            turn.push(held)
            turn.end(stored, body)
            await self.live.end_if_over(live)
        except asyncio.CancelledError:
            turn.fail(turn.stopped or _stopping())
            if turn.stopped is None:
                raise
            self._metrics.failed(request.dialect, turn.stopped.status)
        except Exception as error:  # the turn's readers get it; the server's own faults are logged
            failure = _failure(error, request.id)
            self._metrics.failed(request.dialect, failure.status)
            turn.fail(failure)
        finally:
            live.end_turn(turn)

    def _task_ended(self, task: asyncio.Task[None], turn: RunningTurn, live: LiveSession) -> None:
        self._tasks.discard(task)
        if turn in live.running:  # cancelled before it began
            live.end_turn(turn)
            turn.fail(turn.stopped or _stopping())

    async def _store(self, turns: list[AgentTurn], live: LiveSession) -> list[AgentTurn]:
        """The turns as they are stored, all at once: an end or a crash leaves all choices of an answer or none. Raises
        OpenAIError 403 if the session has ended."""
        stored = await asyncio.gather(*map(self._stored.add, turns))
        if len(kept := [each for each in stored if each is not None]) < len(turns):
            raise await self.live.why_ended(live)
        return kept

    async def _sampled(self, turn: RunningTurn, answers: Answers, plan: Plan) -> tuple[list[bytes], bytes | None]:
        """Sample the answer. Returns what is held back of it: the last chunks, or the whole body."""
        asked, model = plan.asked, plan.request.model
        service = self._planner.models[asked.target.number].service
        held: list[bytes] = []
        body = None
        if turn.streams:
            async for chunk in service.stream(asked):
                shown, ends = answers.chunk(chunk, model)
                if ends or held:
                    held.append(shown)
                else:
                    turn.push([shown])
        else:
            body = answers.whole(await service.answer(asked), model)
        answers.check(None if plan.tokens is None else len(plan.tokens))
        return held, body

    def _turns_of(
        self,
        turn: RunningTurn,
        live: LiveSession,
        plan: Plan,
        answers: Answers,
        key: bytes,
        attempt: int,
        began: float,
    ) -> list[AgentTurn]:
        """The turns of a complete answer, one for each choice."""
        if plan.tokens is None:
            added = np.array(answers.prompt, np.int32)
        else:
            before = 0 if plan.parent is None else live.tree.length(plan.parent)
            added = plan.tokens[before:].copy()  # a view would keep the whole prompt with each turn
        turns = []
        for number, choice in enumerate(answers.choices):
            ids, logprobs = choice.arrays
            turns.append(
                AgentTurn(
                    id=turn.id if number == 0 else f"{turn.id}.{number}",
                    session_id=live.session.id,
                    parent=None if plan.parent is None else plan.parent.id,
                    key=key,
                    attempt=attempt + number,
                    messages=plan.messages,
                    setting=plan.setting,
                    added=added,
                    sampled=ids,
                    logprobs=logprobs,
                    versions=_versions(plan.asked.target, choice.versions),
                    answer=bare(choice.message),
                    finish_reason=choice.ended,
                    stop_reason=choice.stop_reason,
                    usage=answers.usage | {"sampled": len(ids)},
                    dialect=plan.request.dialect,
                    created_at=began,
                    ended_at=time.time(),
                    fork=_fork(live, plan, attempt + number),
                    forked_at=plan.prompt.forked_at,
                    template_note=plan.prompt.template_note,
                    routed_experts=choice.experts,
                    constrained=choice.constrained,
                    own_logprobs=choice.tells_constrained or not plan.generation.has_grammar,
                )
            )
        return turns


def _stopping() -> RequestError:
    return RequestError("the server is stopping; send the request again", status=503, retry_after_s=1)


def _failure(error: Exception, request_id: str) -> RequestError:
    """What the readers of a turn get for an error. The server's own faults are logged."""
    if isinstance(error, RequestError):
        return error
    logger.error("a turn failed", exc_info=error, extra=about_request(request_id))
    if isinstance(error, MalformedAnswer):
        return OpenAIError("the inference server's answer lacks tokens or logprobs", status=503, final=True)
    return RequestError(f"internal error: {type(error).__name__}", status=500)


def _added(live: LiveSession, plan: Plan) -> int:
    """About how many tokens a plan adds to the session, before the answer."""
    if plan.tokens is None:
        return plan.generation.size.likely_prompt
    return len(plan.tokens) - (0 if plan.parent is None else live.tree.length(plan.parent))


def _fork(live: LiveSession, plan: Plan, attempt: int) -> ForkReason | None:
    """Why a turn that ends now does not continue the newest turn: another one may have ended before it."""
    if attempt:
        return "asked_again"
    fork = plan.prompt.fork
    return "branch" if fork is None and plan.parent is not None and live.is_continued(plan.parent) else fork


def _versions(target: Target, told: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """Which weights sampled which tokens. What the inference server tells is of its own weights, not of an adapter on
    them, which never changes. Where it tells nothing, all tokens are of the weights that were asked for."""
    match target.weights:
        case AdapterVersion(name):
            return (VersionSpan(0, name),)
        case BaseWeights():
            return told or (VersionSpan(0, "base"),)
        case weights:
            return told or (VersionSpan(0, weights.name),)
