"""The agent sessions that this process answers for now, each with its tree in memory, read from the database once; and
what is counted of sessions: their turns, tokens and forks, and how they end. No label names a session.

`RunningTurn` is a turn while it is sampled: what is there of its answer, for any number of readers. A turn goes on when
its reader goes: a client whose connection broke asks again, and gets the same answer. It ends with its session.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from skyrl.base.types.agents import AgentSession, AgentTurn, EndReason, ForkReason
from skyrl.base.wire.errors import RequestError
from skyrl.chat.agents.rendering.continuation import Kept
from skyrl.chat.agents.tree import Tree
from skyrl.chat.openai.errors import OpenAIError
from skyrl.runtime.metrics.tallies import OK, SERVER_ERROR, USER_ERROR
from skyrl.storage.db.agents import AgentSessions, AgentTurns
from skyrl.storage.db.retention import PAUSE_S
from skyrl.storage.db.sessions import Continuity
from skyrl.storage.notices import PeerNotifier

Dialect = Literal["chat", "messages", "responses"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)
TURN_OUTCOMES = (OK, USER_ERROR, SERVER_ERROR)
FORKS: tuple[ForkReason, ...] = get_args(ForkReason)
ENDS: tuple[EndReason, ...] = get_args(EndReason)
TOKENS = ("prompt", "prompt_cached", "added", "sampled")
OWN_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)


class AgentMetrics:
    """Each series exists from the start. An unknown dialect or reason is a KeyError: clients can add no series."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._open = Gauge("skyrl_agent_sessions", "Agent sessions in memory.", registry=registry)
        turns = Counter("skyrl_agent_turns", "Turns that ended.", ["dialect", "outcome"], registry=registry)
        self._turns = {(dialect, end): turns.labels(dialect, end) for dialect in DIALECTS for end in TURN_OUTCOMES}
        about = "Requests that got the stored answer of an earlier turn."
        self._repeats = _each(Counter("skyrl_agent_repeats", about, ["dialect"], registry=registry), DIALECTS)
        about = "Turns that do not continue the newest turn before them."
        self._forks = _each(Counter("skyrl_agent_forks", about, ["reason"], registry=registry), FORKS)
        about = "Tokens of turns that succeeded; `added` is the part of `prompt` that no earlier turn had."
        self._tokens = _each(Counter("skyrl_agent_tokens", about, ["kind"], registry=registry), TOKENS)
        about = "Agent sessions that this process has ended."
        self._ends = _each(Counter("skyrl_agent_sessions_ended", about, ["reason"], registry=registry), ENDS)
        about = "Time until a turn's place in the session and its prompt's tokens are known."
        self._own = Histogram("skyrl_agent_own_seconds", about, buckets=OWN_BOUNDS, registry=registry)

    def watch(self, sessions: Callable[[], int]) -> None:
        """Show this number of sessions. It is asked at each scrape, on another thread."""
        self._open.set_function(sessions)

    def answered(self, turns: Sequence[AgentTurn], own_s: float) -> None:
        """Count the new turns of one request, one for each choice. `own_s` is the time that was spent to find the
        request's place and to make its tokens."""
        first = turns[0]
        self._turns[first.dialect, OK].inc(len(turns))
        self._tokens["prompt"].inc(first.usage["prompt"])
        self._tokens["prompt_cached"].inc(first.usage["cached"])
        self._tokens["added"].inc(len(first.added))
        self._tokens["sampled"].inc(sum(len(turn.sampled) for turn in turns))
        for turn in turns:
            if turn.fork is not None:
                self._forks[turn.fork].inc()
        self._own.observe(own_s)

    def failed(self, dialect: str, status: int) -> None:
        """Count a turn that was answered with this HTTP status of an error. A request that was refused for now (429) is
        no turn; `skyrl_samples_refused_total` counts it."""
        if status != 429:
            self._turns[dialect, SERVER_ERROR if status >= 500 else USER_ERROR].inc()

    def repeated(self, dialect: str) -> None:
        self._repeats[dialect].inc()

    def ended(self, reason: EndReason, number: int = 1) -> None:
        """Count the ends of sessions."""
        self._ends[reason].inc(number)


def _each(counter: Counter, values: Sequence[str]) -> dict[str, Counter]:
    """The series of a counter's only label."""
    return {value: counter.labels(value) for value in values}


class RunningTurn:
    """`parent` is the turn that it continues, `tokens` the most that it can add to the session's. With `streams` the
    inference server streams the answer."""

    def __init__(self, turn_id: str, parent: AgentTurn | None, *, tokens: int, n: int, streams: bool) -> None:
        self.id = turn_id
        self.parent = parent
        self.tokens = tokens
        self.n = n
        self.streams = streams
        self.turns: Sequence[AgentTurn] = ()
        """The stored turns, one for each choice, once the answer is complete."""
        self.body: bytes | None = None
        """The whole answer, once it is complete, if the inference server did not stream it."""
        self.is_complete = False
        """Whether the answer is complete: it is stored next, and then its end goes to the readers."""
        self.task: asyncio.Task[None] | None = None
        """What samples the answer."""
        self.stopped: RequestError | None = None
        """Why the turn was ended before its answer was complete."""
        self._readers = 0
        self._had_readers = False
        self._chunks: list[bytes] = []
        self._error: RequestError | None = None
        self._ended = False
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def left(self) -> bool:
        """Its clients have gone. One that has only just asked, and reads nothing yet, has not."""
        return self._had_readers and not self._readers

    def push(self, chunks: Sequence[bytes]) -> None:
        """Add chunks of a streamed answer."""
        self._chunks += chunks
        self._wake()

    def end(self, turns: Sequence[AgentTurn], body: bytes | None) -> None:
        self.turns, self.body, self._ended = turns, body, True
        self._wake()

    def stop(self, reason: RequestError) -> None:
        """End the turn, and with it its request to the inference server, unless its answer is complete."""
        if not self.is_complete and self.stopped is None and self.task is not None:
            self.stopped = reason
            self.task.cancel()

    def fail(self, error: RequestError) -> None:
        """Each reader gets this error."""
        self._error, self._ended = error, True
        self._wake()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed answer, from the first. Raises RequestError."""
        self._came()
        try:
            seen = 0
            while True:
                while seen < len(self._chunks):
                    seen += 1
                    yield self._chunks[seen - 1]
                if self._ended:
                    break
                await self._changed()
            if self._error is not None:
                raise self._error
        finally:
            self._readers -= 1

    async def wait(self) -> None:
        """Returns at the end of the answer. Raises RequestError."""
        self._came()
        try:
            while not self._ended:
                await self._changed()
            if self._error is not None:
                raise self._error
        finally:
            self._readers -= 1

    def _came(self) -> None:
        self._readers += 1
        self._had_readers = True

    async def _changed(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


MAX_BYTES = 512 * 2**20
"""Of all sessions in memory, beside those in use (`is_busy`), as MAX_SESSIONS."""
MAX_SESSIONS = 10_000
_ENDED = {
    "called": "it was ended by a call",
    "turns": "it has had all its turns",
    "tokens": "it has used all its tokens",
    "bytes": "its messages are too large together",
    "time": "its time is over",
    "idle": "it was idle for too long",
}


class LiveSession:
    """A session and its turns. `row` is the number of the last row of the table of turns that was read."""

    def __init__(self, session: AgentSession, tree: Tree, row: int) -> None:
        self.session = session
        self.tree = tree
        self.row = row
        self.running: list[RunningTurn] = []
        self.planned = 0
        """How many requests are placed and planned now: their turns do not run yet."""
        self.keys: dict[str, bytes] = {}
        """The key of each running turn, by its id."""
        self.delivered: set[str] = set()
        """Turns whose answer has reached its client whole."""
        self.kept = Kept()
        """Renderings that the next turns begin with."""
        self.last_request_bytes = 0
        """About what the tree remembers of the request that was placed last, in memory: it may never become a turn."""
        self.used_at = session.used_at

    @property
    def nbytes(self) -> int:
        """About what the session takes in memory."""
        return self.tree.nbytes + self.last_request_bytes

    @property
    def is_busy(self) -> bool:
        """Whether a turn runs or is planned. It holds this object: the session must not be read a second time."""
        return bool(self.running) or self.planned > 0

    def check_open(self) -> None:
        """Raises OpenAIError 403 if the session has ended."""
        if (reason := self.session.end_reason) is not None:
            raise ended(reason)

    def end_turn(self, turn: RunningTurn) -> None:
        """A turn runs no more."""
        self.running.remove(turn)
        del self.keys[turn.id]
        self.used_at = time.time()

    def stop_turns(self) -> None:
        """End the running turns of a session that has ended. One whose answer is complete is stored already, or is
        refused when it is stored."""
        if (reason := self.session.end_reason) is not None:
            for turn in self.running:
                turn.stop(ended(reason))

    def running_with(self, key: bytes) -> RunningTurn | None:
        """The newest running turn of the same request."""
        return next((turn for turn in reversed(self.running) if self.keys[turn.id] == key), None)

    def is_continued(self, turn: AgentTurn) -> bool:
        """Whether a turn continues this one: a turn of the tree, or one that is complete and not yet stored."""
        if self.tree.has_child(turn):
            return True
        return any(each.is_complete and each.parent is not None and each.parent.id == turn.id for each in self.running)

    def was_delivered(self, turn: AgentTurn) -> bool:
        """A turn that was continued was delivered."""
        return turn.id in self.delivered or self.tree.has_child(turn)

    def over(self, now: float, most_bytes: int) -> EndReason | None:
        """The limit that the session has reached at `now` (seconds since the epoch)."""
        limits = self.session.limits
        if len(self.tree) >= limits.turns:
            return "turns"
        if self.tree.tokens >= limits.tokens:
            return "tokens"
        if self.tree.nbytes >= most_bytes:
            return "bytes"
        if now >= self.session.created_at + limits.seconds:
            return "time"
        return "idle" if not self.is_busy and now >= self.used_at + limits.idle_s else None

    @property
    def tokens_left(self) -> int:
        """Tokens that one more turn may add, beside the running ones."""
        return self.session.limits.tokens - self.tree.tokens - sum(turn.tokens for turn in self.running)

    @property
    def turns_left(self) -> int:
        return self.session.limits.turns - len(self.tree) - sum(turn.n for turn in self.running)


class LiveSessions:
    """With `alone` no other process answers for the same sessions, and nothing is read twice. A session may have
    `most_bytes` of messages and tokens."""

    def __init__(
        self,
        sessions: AgentSessions,
        turns: AgentTurns,
        metrics: AgentMetrics,
        peers: PeerNotifier,
        *,
        alone: bool,
        most_bytes: int,
        continuity: Continuity,
    ) -> None:
        self._sessions = sessions
        self._turns = turns
        self._peers = peers
        self.alone = alone
        self._most_bytes = most_bytes
        self._continuity = continuity
        self._metrics = metrics
        metrics.watch(lambda: len(self))
        self._live: OrderedDict[str, LiveSession] = OrderedDict()
        self._loading: dict[str, asyncio.Task[LiveSession]] = {}

    def __len__(self) -> int:
        return len(self._live)

    async def open(self, session_id: str, tenant: str) -> LiveSession:
        """A session, which may have ended; see `check_open`. Raises OpenAIError 404 if there is none."""
        live = self._live.get(session_id)
        if live is None or not self.alone:
            live = await self._read(session_id)
        if live.session.tenant != tenant:
            raise _unknown()
        self._live[session_id] = live
        self._live.move_to_end(session_id)
        if live.session.end_reason is None and await self.end_if_over(live) is None:
            live.used_at = time.time()
            self._sessions.note_use(session_id)
        return live

    async def end_if_over(self, live: LiveSession) -> EndReason | None:
        """End an open session that has reached a limit. Returns which."""
        reason = live.over(time.time(), self._most_bytes)
        if reason == "idle" and not (self.alone and self._continuity.seconds >= live.session.limits.idle_s):
            return None  # another process may have answered just now; the sweep knows of it. Or nobody could ask
        if reason is not None:
            await self.end(live.session.id, reason)
        return reason

    async def end(self, session_id: str, reason: EndReason) -> bool:
        """End a session, and its running turns at once, here and in other processes: its trajectory does not change any
        more. False if it has ended before, or there is none."""
        now = time.time()
        ends = await self._sessions.end(session_id, reason, now)
        if (live := await self._in_memory(session_id)) is not None:
            if live.session.end_reason is None:
                live.session = replace(live.session, ended_at=now, end_reason=reason)
            live.stop_turns()
        if ends:
            self._metrics.ended(reason)
            self._peers.agent_session_ended(session_id)
        return ends

    async def look_again(self, session_id: str) -> None:
        """Another process may have ended a session, or deleted it: end its running turns here, and begin no others."""
        if await self._in_memory(session_id) is not None:
            with suppress(OpenAIError):  # there is none any more
                (await self._read(session_id)).stop_turns()

    async def why_ended(self, live: LiveSession) -> RequestError:
        """The refusal of a turn of a session that this or another process has ended."""
        if live.session.end_reason is None:
            await self.look_again(live.session.id)
        return ended(live.session.end_reason or "called")

    async def end_over(self) -> None:
        """End the sessions whose time is over or that were idle for too long, whether they are in memory or not. Call
        it several times a minute."""
        now = time.time()
        idle_since = now - self._continuity.seconds
        while (ended := await self._sessions.end_over(now, idle_since=idle_since)).total():
            for reason, number in ended.items():
                self._metrics.ended(reason, number)
            await asyncio.sleep(PAUSE_S)

    def peek(self, session_id: str) -> LiveSession | None:
        """The session, if it is in memory."""
        return self._live.get(session_id)

    async def shrink(self) -> None:
        """Forget the sessions that were used least recently, until those that are not in use are within the bounds."""
        idle = {session_id: live for session_id, live in self._live.items() if not live.is_busy}
        size, number = sum(live.nbytes for live in idle.values()), len(idle)
        for session_id, live in idle.items():
            if size <= MAX_BYTES and number <= MAX_SESSIONS:
                return
            size -= live.nbytes
            number -= 1
            del self._live[session_id]

    async def note_running(self) -> None:
        """A session with a turn that runs or is planned is in use, however long that takes, until its time is over.
        Call it several times a minute."""
        for session_id, live in list(self._live.items()):
            if not live.is_busy:
                continue
            live.used_at = time.time()
            self._sessions.note_use(session_id)
            if not self.alone:
                await self.look_again(session_id)
            if live.session.end_reason is None:
                await self.end_if_over(live)

    async def _in_memory(self, session_id: str) -> LiveSession | None:
        """The session, if it is in memory. One that is being read, perhaps as it was before now, is awaited."""
        if (reading := self._loading.get(session_id)) is not None:
            await asyncio.wait({reading})
        return self._live.get(session_id)

    async def _read(self, session_id: str) -> LiveSession:
        """From the database, once for all requests that wait for it."""
        task = self._loading.get(session_id)
        if task is None:
            task = self._loading[session_id] = asyncio.create_task(self._load(session_id))
            task.add_done_callback(lambda _: self._loading.pop(session_id, None))
        return await asyncio.shield(task)

    async def _load(self, session_id: str) -> LiveSession:
        session = await self._sessions.find(session_id)
        if session is None:
            if (gone := self._live.pop(session_id, None)) is not None:
                gone.session = replace(gone.session, ended_at=time.time(), end_reason="called")
                gone.stop_turns()
            raise _unknown()
        live = self._live.get(session_id) or LiveSession(session, Tree(), 0)
        live.session = session
        live.used_at = max(live.used_at, session.used_at)  # another process may have answered since
        turns, live.row = await self._turns.of(session_id, live.row)
        for turn in turns:
            live.tree.add(turn, session.keep_thinking)
        self._live[session_id] = live
        return live


def over_budget(live: LiveSession, turns: int, tokens: int) -> RequestError:
    """The refusal of a request that adds `turns` and `tokens`, and of which not enough are left."""
    left = f"{max(0, live.turns_left)} turns and {max(0, live.tokens_left)} tokens left"
    said = f"this agent session has {left}; the request needs {turns} turns and {tokens} tokens before its answer"
    return OpenAIError(said, status=403, code="agent_session_limit", final=True)


def ended(reason: EndReason) -> RequestError:
    """The refusal of a request after the session's end."""
    said = f"this agent session has ended: {_ENDED[reason]}"
    return OpenAIError(said, status=403, code="agent_session_ended", final=True)


def _unknown() -> RequestError:
    return OpenAIError("this agent session does not exist any more", status=404, code="agent_session_not_found")
