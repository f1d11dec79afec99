"""The command log against a plain list, whatever happens to it: commands that come reordered, twice, or changed; rings
and answers that are lost; an API process and an engine that die anywhere and come back.

Each run is the same; COMMAND_LOG_EXAMPLES=5000 tries so many others.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from engine_harness import Models, until
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from mortal_engine import ALL, NOT_FINITE, REFUSED, MortalEngine, State, add_pass, add_step, fresh
from sqlalchemy import func, select

from skyrl.backends.base import InvalidRequest
from skyrl.config.server import ServerConfig
from skyrl.db import futures as rows
from skyrl.db.database import Database
from skyrl.db.futures import SESSION_ENDED, Outcome
from skyrl.db.models import Model, models
from skyrl.db.sessions import Session, Sessions
from skyrl.db.writer import GroupCommitWriter
from skyrl.engine import loop as engine_loop
from skyrl.engine.crash_ledger import POISON
from skyrl.engine.recovery import SKIPPED
from skyrl.futures.store import FutureStore, NewRequest
from skyrl.notify.doorbell import SESSIONS
from skyrl.types.kinds import Kind
from skyrl.types.lora import LoraSpec
from skyrl.wire.errors import ErrorCategory, RequestError
from skyrl.wire.paths import model_id_of
from skyrl.wire.results import encode_forward_backward, encode_json
from tests.databases import StateDatabases
from tests.postgres_server import ON_BOTH

T = TypeVar("T")
TENANT = "t" * 32
EXAMPLES = {"sqlite": 30, "postgres": 3}
OTHERS = int(os.environ.get("COMMAND_LOG_EXAMPLES", "0"))
NEVER_S, ALWAYS_S = 1e9, 1e-9


WHICH = st.integers(0, 5)
PASS, STEP, SAVE = (Kind.FORWARD_BACKWARD, 1), (Kind.OPTIM_STEP, 0.5), (Kind.SAVE_WEIGHTS, None)
NEWEST = (Kind.LOAD_WEIGHTS, -1)
WHAT = st.one_of(
    st.tuples(st.just(Kind.FORWARD_BACKWARD), st.sampled_from([1, 2, 3, REFUSED, NOT_FINITE])),
    st.tuples(st.just(Kind.OPTIM_STEP), st.sampled_from([0.5, 0.25])),
    st.just(SAVE),
    st.tuples(st.just(Kind.LOAD_WEIGHTS), WHICH),
)
WORK = st.one_of(
    st.lists(WHAT, min_size=1, max_size=5),
    st.sampled_from([[PASS, PASS, STEP], [PASS, STEP, SAVE], [SAVE, PASS, NEWEST, STEP], [PASS, SAVE, STEP, NEWEST]]),
)


@dataclass(frozen=True)
class Sent:
    """A command that was accepted."""

    id: str
    kind: Kind
    body: bytes
    value: Any = None


@dataclass
class Client:
    """One model, and the plain list of what it was told, by number."""

    session: Session
    model_id: str
    sent: dict[int, Sent] = field(default_factory=dict)
    ended: bool = False

    @property
    def missing(self) -> list[int]:
        """The next numbers to send, three of them."""
        return [number for number in range(len(self.sent) + 3) if number not in self.sent][:3]

    def due(self) -> list[Sent]:
        """In their order, up to the first number that is missing."""
        return [self.sent[number] for number in range(self.missing[0])]

    def body(self, number: int, kind: Kind, value: Any) -> bytes:
        told: dict[str, Any] = {}
        if kind is Kind.FORWARD_BACKWARD:
            datum = {"model_input": {"chunks": [{"tokens": [value]}]}, "loss_fn_inputs": {}}
            told = {"forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
        elif kind is Kind.OPTIM_STEP:
            told = {"adam_params": {"learning_rate": value}}
        elif kind is Kind.SAVE_WEIGHTS:
            told = {"path": value}
        elif kind is Kind.LOAD_WEIGHTS:
            told = {"path": self.path(value), "optimizer": True}
        return json.dumps({"model_id": self.model_id, "seq_id": number, **told}).encode()

    def path(self, name: str) -> str:
        return f"tinker://{self.model_id}/weights/{name}"


class Expected:
    """What becomes of a model that is told one command after the other."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._saved: dict[str, State] = {}
        self.state: State | None = None

    def run(self, sent: Sent) -> Outcome:
        try:
            return self._run(sent)
        except (InvalidRequest, FloatingPointError) as error:
            return Outcome(error=str(error), error_category=ErrorCategory.USER)

    def _run(self, sent: Sent) -> Outcome:
        model_id = self._client.model_id
        if sent.kind is Kind.CREATE_MODEL:
            self.state = fresh()
            return Outcome(encode_json({"type": "create_model", "model_id": model_id}))
        assert self.state is not None
        if sent.kind is Kind.FORWARD_BACKWARD:
            result = add_pass(self.state, sent.value)
            return Outcome(encode_forward_backward(result.logprobs, result.metrics), "proto:forward_backward")
        if sent.kind is Kind.OPTIM_STEP:
            return Outcome(encode_json({"type": "optim_step", "metrics": add_step(self.state, sent.value)}))
        path = self._client.path(sent.value)
        if sent.kind is Kind.SAVE_WEIGHTS:
            self._saved[sent.value] = copy.deepcopy(self.state)
            return Outcome(encode_json({"type": "save_weights", "path": path}))
        if sent.value not in self._saved:
            return Outcome(error=f"path: no training checkpoint {path!r}", error_category=ErrorCategory.USER)
        self.state = copy.deepcopy(self._saved[sent.value])
        return Outcome(encode_json({"type": "load_weights", "path": path, "model_id": model_id}))


class CommandLog(RuleBasedStateMachine):
    """Clients of one to three models, an API process and an engine.

    No rule has a precondition. After how many instructions the engine dies depends on its threads, so a rule that is
    there only while it lives would make Hypothesis draw differently from one time to the next, which it refuses.
    """

    new_url: Callable[[Path], str]

    def __init__(self) -> None:
        super().__init__()
        self.home = tempfile.TemporaryDirectory(prefix="skyrl-log-")
        self.loop = asyncio.new_event_loop()
        self.looking: set[asyncio.Task[Any]] = set()
        self.read: dict[str, Outcome] = {}
        self.died: Counter[str] = Counter()
        """Deaths of the engine that a command was running at, and had not ended."""
        self.clients: list[Client] = []
        self.died_at_start = False

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    # Beginning and end

    @initialize(count=st.integers(1, 3), merges=st.booleans(), snapshots=st.sampled_from([NEVER_S, ALWAYS_S]))
    def begin(self, count: int, merges: bool, snapshots: float) -> None:
        state_dir = Path(self.home.name)
        self.config = ServerConfig(  # pyright: ignore[reportCallIssue]
            state_dir=state_dir, database_url=self.new_url(state_dir), snapshot_interval_s=snapshots
        )
        self.database = Database(self.config.database)
        self.do(self.start(count, merges))

    async def start(self, count: int, merges: bool) -> None:
        self.open_api()
        known = Models(self.database, self.writer)
        for number in range(count):
            session = await self.sessions.create(TENANT, [], None, "")
            model_id = model_id_of(session.id, 0)
            lora = LoraSpec(4, 32.0, number)
            await known.create(Model(model_id, session.id, TENANT, "tiny", lora, None), 0)
            self.clients.append(Client(session, model_id))
        self.engine = MortalEngine(self.config, self.heard, merges_passes=merges)
        assert await self.engine.start()

    def open_api(self) -> None:
        self.writer = GroupCommitWriter(self.database)
        self.store = FutureStore(self.database, self.writer)
        self.sessions = Sessions(self.database, self.writer)

    def heard(self, words: list[str]) -> None:
        task = self.loop.create_task(self.store.read_outcomes(words))
        self.looking.add(task)
        task.add_done_callback(self.looking.discard)

    def teardown(self) -> None:
        try:
            if self.clients:
                self.do(self.end())
        finally:
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            self.home.cleanup()

    async def end(self) -> None:
        try:
            self.engine.rings.deaf = False
            await self.drain()
            for client in self.clients:
                await self.check_all(client)
                for number in client.missing:  # and so everything that waited has its turn
                    await self.send(client, number, Kind.FORWARD_BACKWARD, number)
            await self.drain()
            for client in self.clients:
                await self.check_all(client)
            stored = self.database.read(lambda c: c.execute(select(func.count()).select_from(rows.futures)).scalar())
            assert stored == sum(len(client.sent) for client in self.clients), "nothing else was accepted"
        finally:
            await self.engine.close()
            await asyncio.gather(*self.looking)
            await self.writer.close()
            self.database.close()

    # What clients do

    async def record(self, client: Client, number: int, kind: Kind, body: bytes) -> tuple[str, bool]:
        return await self.store.record(
            NewRequest(kind, TENANT, client.session.id, body, model_id=client.model_id, seq_id=number)
        )

    async def send(self, client: Client, number: int, kind: Kind, value: Any, *, rings: bool = True) -> None:
        kind = Kind.CREATE_MODEL if number == 0 else kind
        body = client.body(number, kind, value)
        request_id, new = await self.record(client, number, kind, body)
        assert new
        client.sent[number] = Sent(request_id, kind, body, value)
        if rings:
            self.engine.ring()
            await self.engine_rests()

    def client(self, index: int) -> Client:
        return self.clients[index % len(self.clients)]

    def named(self, client: Client, number: int, kind: Kind, value: Any) -> Any:
        """A save has a name of its own; a load asks for one that was sent, or for none that is there."""
        if kind is Kind.SAVE_WEIGHTS:
            return f"c{number}"
        if kind is Kind.LOAD_WEIGHTS:
            saves = [sent.value for _, sent in sorted(client.sent.items()) if sent.kind is Kind.SAVE_WEIGHTS]
            return saves[value % len(saves)] if saves else "nothing"
        return value

    @rule(which=WHICH, later=st.integers(0, 2), what=WHAT, rings=st.booleans())
    def command_arrives(self, which: int, later: int, what: tuple[Kind, Any], rings: bool) -> None:
        """The next one, or one that has overtaken others; its ring may be lost."""
        client = self.client(which)
        number = client.missing[later]
        self.do(self.send(client, number, what[0], self.named(client, number, *what), rings=rings))

    @rule(which=WHICH, work=WORK, rings=st.booleans())
    def work_arrives(self, which: int, work: list[tuple[Kind, Any]], rings: bool) -> None:
        """As a client sends it: everything at once, in order."""
        self.send_all(self.client(which), work, rings=rings)

    def send_all(self, client: Client, work: list[tuple[Kind, Any]], *, rings: bool) -> None:
        for kind, value in work:
            number = client.missing[0]
            self.do(self.send(client, number, kind, self.named(client, number, kind, value), rings=rings))

    @rule(which=WHICH, index=WHICH)
    def command_is_repeated(self, which: int, index: int) -> None:
        """Its answer was lost."""
        if client := self.client(which) if self.client(which).sent else None:
            number = sorted(client.sent)[index % len(client.sent)]
            sent = client.sent[number]
            assert self.do(self.record(client, number, sent.kind, sent.body)) == (sent.id, False)

    @rule(which=WHICH, index=WHICH)
    def number_is_used_again(self, which: int, index: int) -> None:
        """For something else, which is refused."""
        if client := self.client(which) if self.client(which).sent else None:
            number = sorted(client.sent)[index % len(client.sent)]
            sent = client.sent[number]
            with pytest.raises(RequestError, match="seq_id"):
                self.do(self.record(client, number, sent.kind, sent.body + b" "))

    @rule(which=WHICH, index=WHICH)
    def answer_is_polled(self, which: int, index: int) -> None:
        client = self.client(which)
        if client.sent:
            sent = client.sent[sorted(client.sent)[index % len(client.sent)]]
            self.do(self.poll(sent))

    async def poll(self, sent: Sent) -> Outcome | None:
        outcome = await self.store.wait(sent.id, TENANT, 0.0)
        if outcome is not None:
            assert self.read.setdefault(sent.id, outcome) == outcome, "whoever asks again gets the same"
        assert outcome is not None or sent.id not in self.read
        return outcome

    @rule(which=WHICH, really=st.sampled_from([False, False, True]), saving=st.booleans())
    def session_ends(self, which: int, really: bool, saving: bool) -> None:
        client = self.client(which)
        if really and not client.ended:
            self.do(self.end_saving(client) if saving and self.engine.alive else self.end_session(client))

    async def end_saving(self, client: Client) -> None:
        """In the middle of a save, if that has its turn: what the save comes to afterwards changes nothing."""
        number = client.missing[0]
        await self.send(client, number, Kind.SAVE_WEIGHTS, f"c{number}", rings=False)
        async with self.engine.held_at_a_save():
            await self.end_session(client)
            self.engine.ring([SESSIONS])
            await self.closed(client)
            assert await self.poll(client.sent[number]) is not None

    async def closed(self, client: Client) -> None:
        living = select(models.c.id).where(models.c.id == client.model_id, models.c.status.in_(("creating", "ready")))
        await until(lambda: self.database.read(lambda c: c.execute(living).first()) is None)

    async def end_session(self, client: Client) -> None:
        if await self.sessions.end(client.session, "finished", None, None):
            client.ended = True
            self.store.drop_session(client.session.id)

    # What becomes of the processes

    async def engine_rests(self) -> None:
        if self.engine.alive and not await self.engine.wait_until_idle():
            self.note_death()

    def note_death(self) -> None:
        """A command is to blame if it was running and has not ended."""
        pending = self.database.read(lambda c: {command.request_id for command in rows.pending(c, sorted(Kind))})
        self.died.update(pending.intersection(self.engine.running))

    @rule(turns=st.integers(1, 3), deaf=st.booleans())
    def engine_runs(self, turns: int, deaf: bool) -> None:
        """Its rings to the API may be lost."""
        if self.engine.alive:
            self.engine.rings.deaf = deaf
            self.note(self.do(self.engine.turns(turns)))

    @rule(work=WORK, deaths=st.lists(st.integers(0, 25), min_size=1, max_size=4), back=st.booleans())
    def engine_dies_at_work(self, work: list[tuple[Kind, Any]], deaths: list[int], back: bool) -> None:
        """After so many instructions, again and again, while every model is at it."""
        for client in self.clients:
            self.send_all(client, work if not client.ended else [], rings=True)
        for steps in deaths:
            self.start_engine()
            self.engine.die_after_steps(steps)
            self.note(self.do(self.engine.turns(ALL)))
        if back:
            self.start_engine()

    def start_engine(self) -> None:
        if not self.engine.alive:
            assert self.do(self.engine.start())

    def note(self, lives: bool) -> None:
        self.engine.die_after_steps(None)
        if not lives:
            self.note_death()

    @rule(steps=st.one_of(st.none(), st.integers(0, 6)))
    def engine_looks(self, steps: int | None) -> None:
        """For what nobody rang for; it may die of what it finds."""
        if self.engine.alive:
            self.engine.die_after_steps(steps)
            self.note(self.do(self.engine.find_lost_rings()))

    @rule()
    def engine_is_stopped(self) -> None:
        self.do(self.engine.stop())

    @rule(steps=st.one_of(st.none(), st.integers(0, 20)))
    def engine_starts(self, steps: int | None) -> None:
        """And may die of that, but not twice. One that lives is stopped before."""
        self.do(self.engine.stop())
        self.engine.die_after_steps(None if self.died_at_start else steps)
        lives = self.do(self.engine.start())
        self.died_at_start = not lives
        self.note(lives)

    @rule()
    def api_looks(self) -> None:
        self.do(self.store.poll_outcomes())

    @rule()
    def api_dies(self) -> None:
        self.do(self.replace_api())

    async def replace_api(self) -> None:
        """What was not answered is still committed, or is not: `send` has waited for it."""
        await self.writer.close()
        await asyncio.gather(*self.looking)
        self.open_api()

    @rule(which=WHICH, turns=st.integers(0, 3), value=st.integers(1, 3))
    def api_dies_before_it_answers(self, which: int, turns: int, value: int) -> None:
        """The client sends it again, to the next API process."""
        self.do(self.interrupted(self.client(which), turns, value))

    async def interrupted(self, client: Client, turns: int, value: int) -> None:
        number = client.missing[0]
        kind = Kind.CREATE_MODEL if number == 0 else Kind.FORWARD_BACKWARD
        body = client.body(number, kind, value)
        recording = asyncio.create_task(self.record(client, number, kind, body))
        for _ in range(turns):
            await asyncio.sleep(0)
        recording.cancel()
        await asyncio.gather(recording, return_exceptions=True)
        await self.replace_api()
        request_id, _ = await self.record(client, number, kind, body)
        client.sent[number] = Sent(request_id, kind, body, value)

    # What holds

    async def drain(self) -> None:
        """Everything that can run runs, however often the engine is started for it."""
        while not self.engine.alive:
            await self.engine.start()
        assert await self.engine.find_lost_rings()
        assert await self.engine.turns(ALL)
        await self.store.poll_outcomes()

    @invariant()
    def outcomes_never_change(self) -> None:
        """Nor does anything run that is not in the list."""
        if self.clients and self.engine.alive:
            assert set(self.engine.backend.models) <= {client.model_id for client in self.clients}

    async def check_all(self, client: Client) -> None:
        """Each command of the list has run once and in its order, and what waits for a missing number waits."""
        expected, gone = Expected(client), False
        for sent in client.due():
            outcome = await self.poll(sent)
            assert outcome is not None, "it has its turn, whatever other models wait for"
            gone = gone or _is_gone(outcome)
            if gone:
                assert _is_gone(outcome), "nothing runs after the end"
            elif outcome.error == SKIPPED:
                assert self.died[sent.id] >= POISON
                gone = sent.kind is Kind.CREATE_MODEL
            else:
                assert outcome == expected.run(sent)
                assert self.died[sent.id] < POISON
        assert not gone or client.ended or client.sent[0].id in self.died
        waiting = [sent for number, sent in client.sent.items() if number > client.missing[0]]
        for sent in waiting:
            outcome = await self.poll(sent)
            assert outcome is None or (_is_gone(outcome) and (gone or client.ended)), "it waits for a missing number"
        assert (client.model_id in self.engine.backend.models) == (
            bool(expected.state) and not gone and not client.ended
        )
        if client.model_id in self.engine.backend.models:
            assert self.engine.backend.models[client.model_id] == expected.state


def _is_gone(outcome: Outcome) -> bool:
    """Failed with its session, or after it."""
    return outcome == SESSION_ENDED or (outcome.error is not None and "is not there any more" in outcome.error)


@pytest.fixture
def new_url(database_kind: str, request: pytest.FixtureRequest) -> Iterator[Callable[[Path], str]]:
    """Makes databases with the tables in them, by state directory."""
    if database_kind == "sqlite":
        file: Path = request.getfixturevalue("migrated_file")

        def copied(state_dir: Path) -> str:
            shutil.copy(file, state_dir / "skyrl.db")
            return f"sqlite:///{state_dir / 'skyrl.db'}"

        yield copied
        return
    databases: StateDatabases = request.getfixturevalue("state_databases")
    yield databases.url_of
    databases.drop_below(Path(tempfile.gettempdir()))


@ON_BOTH
def test_command_log_is_a_plain_list(
    new_url: Callable[[Path], str], database_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "SAFETY_POLL_S", NEVER_S)
    monkeypatch.setattr(CommandLog, "new_url", staticmethod(new_url), raising=False)
    run_state_machine_as_test(
        CommandLog,
        settings=settings(
            derandomize=not OTHERS,
            max_examples=OTHERS or EXAMPLES[database_kind],
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
            phases=[Phase.generate, Phase.shrink] if OTHERS else [Phase.generate],
        ),
    )
