"""The command log must behave like a plain list: under commands that come reordered, twice or changed, under lost rings
and answers, and under deaths and restarts of the API process and the engine.

Every run draws the same examples; COMMAND_LOG_EXAMPLES=5000 draws 5,000 other examples.
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

from skyrl.base.config.server import ServerConfig
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import LoraSpec
from skyrl.base.wire.errors import ErrorCategory, RequestError
from skyrl.base.wire.paths import model_id_of
from skyrl.base.wire.results import encode_forward_backward, encode_json
from skyrl.engine import loop as engine_loop
from skyrl.engine.crash_ledger import DEATHS_TO_BLAME
from skyrl.engine.recovery import SKIPPED
from skyrl.storage.db import futures as rows
from skyrl.storage.db import models as commands
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import SESSION_ENDED, Outcome
from skyrl.storage.db.models import Model, models
from skyrl.storage.db.sessions import Session, Sessions
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.doorbell import SESSIONS
from skyrl.storage.futures.store import FutureStore, NewRequest
from skyrl.trainer.protocol import InvalidRequest
from tests.databases import StateDatabases
from tests.postgres_server import ON_BOTH

T = TypeVar("T")
TENANT = "t" * 32
EXAMPLES = {"sqlite": 20, "postgres": 3}
OTHER_EXAMPLES = int(os.environ.get("COMMAND_LOG_EXAMPLES", "0"))
NEVER_S, ALWAYS_S = 1e9, 1e-9


INDEX = st.integers(0, 5)
PASS, STEP, SAVE = (Kind.FORWARD_BACKWARD, 1), (Kind.OPTIM_STEP, 0.5), (Kind.SAVE_WEIGHTS, None)
NEWEST = (Kind.LOAD_WEIGHTS, -1)
COMMAND = st.one_of(
    st.tuples(st.just(Kind.FORWARD_BACKWARD), st.sampled_from([1, 2, 3, REFUSED, NOT_FINITE])),
    st.tuples(st.just(Kind.OPTIM_STEP), st.sampled_from([0.5, 0.25])),
    st.just(SAVE),
    st.tuples(st.just(Kind.LOAD_WEIGHTS), INDEX),
)
COMMANDS = st.one_of(
    st.lists(COMMAND, min_size=1, max_size=5),
    st.sampled_from([[PASS, PASS, STEP], [PASS, STEP, SAVE], [SAVE, PASS, NEWEST, STEP], [PASS, SAVE, STEP, NEWEST]]),
)


@dataclass(frozen=True)
class AcceptedCommand:
    """A command that the API accepted."""

    id: str
    kind: Kind
    body: bytes
    value: Any = None


@dataclass
class Client:
    """A client of one model, with the plain list of the commands that it sent, by number."""

    session: Session
    model_id: str
    sent: dict[int, AcceptedCommand] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    """Numbers that the client has not sent, and for which the engine waits no longer."""
    not_run: set[int] = field(default_factory=set)
    """Numbers whose commands have waited for a lost number, and lost numbers that were sent later."""
    ended: bool = False

    @property
    def missing(self) -> list[int]:
        """The three lowest numbers that the client has not sent, and that are not lost."""
        numbers = range(len(self.sent) + len(self.lost) + 3)
        return [number for number in numbers if number not in self.sent and number not in self.lost][:3]

    def due(self) -> list[AcceptedCommand]:
        """The commands that may run: in order, up to the first missing number."""
        left_out = self.lost | self.not_run
        return [self.sent[number] for number in range(self.missing[0]) if number not in left_out]

    def body(self, number: int, kind: Kind, value: Any) -> bytes:
        fields: dict[str, Any] = {}
        if kind is Kind.FORWARD_BACKWARD:
            datum = {"model_input": {"chunks": [{"tokens": [value]}]}, "loss_fn_inputs": {}}
            fields = {"forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
        elif kind is Kind.OPTIM_STEP:
            fields = {"adam_params": {"learning_rate": value}}
        elif kind is Kind.SAVE_WEIGHTS:
            fields = {"path": value}
        elif kind is Kind.LOAD_WEIGHTS:
            fields = {"path": self.path(value), "optimizer": True}
        return json.dumps({"model_id": self.model_id, "seq_id": number, **fields}).encode()

    def path(self, name: str) -> str:
        return f"tinker://{self.model_id}/weights/{name}"


class Expected:
    """The outcomes of a model that runs one command after the other."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._saved: dict[str, State] = {}
        self.state: State | None = None

    def run(self, sent: AcceptedCommand) -> Outcome:
        try:
            return self._run(sent)
        except (InvalidRequest, FloatingPointError) as error:
            return Outcome(error=str(error), error_category=ErrorCategory.USER)

    def _run(self, sent: AcceptedCommand) -> Outcome:
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
    """Clients of one to three models, one API process and one engine.

    No rule has a precondition. The number of instructions until a death varies with the engine's threads. A rule that
    exists only while the engine lives would make Hypothesis draw differently in each run, which Hypothesis refuses.
    """

    new_url: Callable[[Path], str]

    def __init__(self) -> None:
        super().__init__()
        self.home = tempfile.TemporaryDirectory(prefix="skyrl-log-")
        self.loop = asyncio.new_event_loop()
        self.reading: set[asyncio.Task[Any]] = set()
        self.outcomes_seen: dict[str, Outcome] = {}
        self.deaths_while_running: Counter[str] = Counter()
        """By request id: how often the engine died while this command ran and was pending."""
        self.clients: list[Client] = []
        self.died_at_start = False

    def run_on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    # Start and end

    @initialize(count=st.integers(1, 3), merges=st.booleans(), snapshots=st.sampled_from([NEVER_S, ALWAYS_S]))
    def begin(self, count: int, merges: bool, snapshots: float) -> None:
        state_dir = Path(self.home.name)
        self.config = ServerConfig(  # pyright: ignore[reportCallIssue]
            state_dir=state_dir, database_url=self.new_url(state_dir), snapshot_interval_s=snapshots
        )
        self.database = Database(self.config.database)
        self.run_on_loop(self.start(count, merges))

    async def start(self, count: int, merges: bool) -> None:
        self.open_api()
        known = Models(self.database, self.writer)
        for number in range(count):
            session = await self.sessions.create(TENANT, [], None, "")
            model_id = model_id_of(session.id, 0)
            lora = LoraSpec(4, 32.0, number)
            await known.create(Model(model_id, session.id, TENANT, "tiny", lora, None), 0)
            self.clients.append(Client(session, model_id))
        self.engine = MortalEngine(self.config, self.read_rung_outcomes, merges_passes=merges)
        assert await self.engine.start()

    def open_api(self) -> None:
        self.writer = GroupCommitWriter(self.database)
        self.store = FutureStore(self.database, self.writer)
        self.sessions = Sessions(self.database, self.writer)

    def read_rung_outcomes(self, words: list[str]) -> None:
        task = self.loop.create_task(self.store.read_outcomes(words))
        self.reading.add(task)
        task.add_done_callback(self.reading.discard)

    def teardown(self) -> None:
        try:
            if self.clients:
                self.run_on_loop(self.end())
        finally:
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            self.home.cleanup()

    async def end(self) -> None:
        try:
            self.engine.rings.are_lost = False
            await self.drain()
            for client in self.clients:
                await self.check_all(client)
                for number in client.missing:  # fill the gaps, so that every waiting command runs
                    await self.send(client, number, Kind.FORWARD_BACKWARD, number)
            await self.drain()
            for client in self.clients:
                await self.check_all(client)
            stored = self.database.read(lambda c: c.execute(select(func.count()).select_from(rows.futures)).scalar())
            assert stored == sum(len(client.sent) for client in self.clients), (
                "the table holds the accepted commands only"
            )
        finally:
            await self.engine.close()
            await asyncio.gather(*self.reading)
            await self.writer.close()
            self.database.close()

    # Rules for clients

    async def record(self, client: Client, number: int, kind: Kind, body: bytes) -> tuple[str, bool]:
        return await self.store.record(
            NewRequest(kind, TENANT, client.session.id, body, model_id=client.model_id, seq_id=number)
        )

    async def send(self, client: Client, number: int, kind: Kind, value: Any, *, rings: bool = True) -> None:
        kind = Kind.CREATE_MODEL if number == 0 else kind
        body = client.body(number, kind, value)
        request_id, new = await self.record(client, number, kind, body)
        assert new
        client.sent[number] = AcceptedCommand(request_id, kind, body, value)
        if rings:
            self.engine.ring()
            await self.engine_rests()

    def client(self, index: int) -> Client:
        return self.clients[index % len(self.clients)]

    def argument_of(self, client: Client, number: int, kind: Kind, value: Any) -> Any:
        """The argument of a command. A save gets a new name; a load gets the name of a save that was sent, or an
        unknown name."""
        if kind is Kind.SAVE_WEIGHTS:
            return f"c{number}"
        if kind is Kind.LOAD_WEIGHTS:
            saves = [sent.value for _, sent in sorted(client.sent.items()) if sent.kind is Kind.SAVE_WEIGHTS]
            return saves[value % len(saves)] if saves else "nothing"
        return value

    @rule(client_index=INDEX, later=st.integers(0, 2), command=COMMAND, rings=st.booleans())
    def command_arrives(self, client_index: int, later: int, command: tuple[Kind, Any], rings: bool) -> None:
        """Send the next command, or one that overtakes commands before it. The ring may be lost."""
        client = self.client(client_index)
        number = client.missing[later]
        self.run_on_loop(self.send(client, number, command[0], self.argument_of(client, number, *command), rings=rings))

    @rule(client_index=INDEX, work=COMMANDS, rings=st.booleans())
    def work_arrives(self, client_index: int, work: list[tuple[Kind, Any]], rings: bool) -> None:
        """Send several commands at once and in order, as a client does."""
        self.send_all(self.client(client_index), work, rings=rings)

    def send_all(self, client: Client, work: list[tuple[Kind, Any]], *, rings: bool) -> None:
        for kind, value in work:
            number = client.missing[0]
            self.run_on_loop(
                self.send(client, number, kind, self.argument_of(client, number, kind, value), rings=rings)
            )

    @rule(client_index=INDEX, index=INDEX)
    def command_is_repeated(self, client_index: int, index: int) -> None:
        """The client lost the answer and sends the command again."""
        if client := self.client(client_index) if self.client(client_index).sent else None:
            number = sorted(client.sent)[index % len(client.sent)]
            sent = client.sent[number]
            assert self.run_on_loop(self.record(client, number, sent.kind, sent.body)) == (sent.id, False)

    @rule(client_index=INDEX, index=INDEX)
    def number_is_used_again(self, client_index: int, index: int) -> None:
        """The client sends another command under a used number, and the server refuses it."""
        if client := self.client(client_index) if self.client(client_index).sent else None:
            number = sorted(client.sent)[index % len(client.sent)]
            sent = client.sent[number]
            with pytest.raises(RequestError, match="seq_id"):
                self.run_on_loop(self.record(client, number, sent.kind, sent.body + b" "))

    @rule(client_index=INDEX, index=INDEX)
    def answer_is_polled(self, client_index: int, index: int) -> None:
        client = self.client(client_index)
        if client.sent:
            sent = client.sent[sorted(client.sent)[index % len(client.sent)]]
            self.run_on_loop(self.poll(sent))

    async def poll(self, sent: AcceptedCommand) -> Outcome | None:
        outcome = await self.store.wait(sent.id, TENANT, 0.0)
        if outcome is not None:
            assert self.outcomes_seen.setdefault(sent.id, outcome) == outcome, "every poll gets the same outcome"
        assert outcome is not None or sent.id not in self.outcomes_seen
        return outcome

    @rule(client_index=INDEX, ends=st.sampled_from([False, False, True]), during_save=st.booleans())
    def session_ends(self, client_index: int, ends: bool, during_save: bool) -> None:
        client = self.client(client_index)
        if ends and not client.ended:
            self.run_on_loop(
                self.end_session_during_save(client) if during_save and self.engine.alive else self.end_session(client)
            )

    async def end_session_during_save(self, client: Client) -> None:
        """End the session in the middle of a save, if the save gets its turn. The result of the save changes
        nothing."""
        number = client.missing[0]
        await self.send(client, number, Kind.SAVE_WEIGHTS, f"c{number}", rings=False)
        async with self.engine.held_at_a_save():
            await self.end_session(client)
            self.engine.ring([SESSIONS])
            await self.wait_until_models_closed(client)
            assert await self.poll(client.sent[number]) is not None

    async def wait_until_models_closed(self, client: Client) -> None:
        living = select(models.c.id).where(models.c.id == client.model_id, models.c.status.in_(("creating", "ready")))
        await until(lambda: self.database.read(lambda c: c.execute(living).first()) is None)

    async def end_session(self, client: Client) -> None:
        if await self.sessions.end(client.session, "finished", None, None):
            client.ended = True
            self.store.drop_session(client.session.id)

    # Rules for the processes

    async def engine_rests(self) -> None:
        if self.engine.alive and not await self.engine.wait_until_idle():
            self.note_death()

    def note_death(self) -> None:
        """A command is to blame for a death if it was running and is still pending."""
        pending = self.database.read(lambda c: {command.request_id for command in commands.pending(c, sorted(Kind))})
        self.deaths_while_running.update(pending.intersection(self.engine.running))

    @rule(turns=st.integers(1, 3), rings_lost=st.booleans())
    def engine_runs(self, turns: int, rings_lost: bool) -> None:
        """Let the engine take turns. Its rings to the API may be lost."""
        if self.engine.alive:
            self.engine.rings.are_lost = rings_lost
            self.note(self.run_on_loop(self.engine.turns(turns)))

    @rule(work=COMMANDS, deaths=st.lists(st.integers(0, 25), min_size=1, max_size=4), back=st.booleans())
    def engine_dies_at_work(self, work: list[tuple[Kind, Any]], deaths: list[int], back: bool) -> None:
        """Let the engine die several times, each time after so many instructions, while every model has work."""
        for client in self.clients:
            self.send_all(client, work if not client.ended else [], rings=True)
        for steps in deaths:
            self.start_engine()
            self.engine.die_after_steps(steps)
            self.note(self.run_on_loop(self.engine.turns(ALL)))
        if back:
            self.start_engine()

    def start_engine(self) -> None:
        if not self.engine.alive:
            assert self.run_on_loop(self.engine.start())

    def note(self, lives: bool) -> None:
        self.engine.die_after_steps(None)
        if not lives:
            self.note_death()

    @rule(steps=st.one_of(st.none(), st.integers(0, 6)))
    def engine_looks(self, steps: int | None) -> None:
        """Let the engine look for commands whose ring was lost. It may die of what it finds."""
        if self.engine.alive:
            self.engine.die_after_steps(steps)
            self.note(self.run_on_loop(self.engine.find_lost_rings()))

    @rule(steps=st.one_of(st.none(), st.integers(0, 6)))
    def missing_numbers_are_given_up(self, steps: int | None) -> None:
        """Let the engine wait no longer for numbers that have not arrived. It may die meanwhile."""
        if self.engine.alive:
            self.engine.die_after_steps(steps)
            self.note(self.run_on_loop(self.engine.give_up_gaps()))
            for client in self.clients:
                self.note_given_up(client)

    def note_given_up(self, client: Client) -> None:
        """Learn from the database which commands have waited in vain, and for which numbers."""
        ids = {sent.id: number for number, sent in client.sent.items() if number not in client.not_run}
        settled = self.database.read(lambda c: rows.find_settled(c, [*ids]))
        failed = [ids[stored.id] for stored in settled if _never_came(stored.outcome)]
        if failed:
            client.not_run.update(failed)
            client.lost.update(number for number in range(max(failed)) if number not in client.sent)
            assert not {number for number in client.sent if number > max(failed)}

    @rule(client_index=INDEX, index=INDEX, command=COMMAND, rings=st.booleans())
    def lost_number_arrives(self, client_index: int, index: int, command: tuple[Kind, Any], rings: bool) -> None:
        client = self.client(client_index)
        if lost := sorted(client.lost):
            number = lost[index % len(lost)]
            value = self.argument_of(client, number, *command)
            self.run_on_loop(self.send(client, number, command[0], value, rings=rings))
            client.lost.discard(number)
            client.not_run.add(number)

    @rule(steps=st.one_of(st.none(), st.integers(0, 20)))
    def engine_is_stopped(self, steps: int | None) -> None:
        """Stop the engine in order. It may die meanwhile, for example in its last snapshots."""
        self.run_on_loop(self.engine.stop(steps))

    @rule(steps=st.one_of(st.none(), st.integers(0, 20)))
    def engine_starts(self, steps: int | None) -> None:
        """Restart the engine. It may die while starting, but not twice in a row."""
        self.run_on_loop(self.engine.stop())
        self.engine.die_after_steps(None if self.died_at_start else steps)
        lives = self.run_on_loop(self.engine.start())
        self.died_at_start = not lives
        self.note(lives)

    @rule()
    def api_looks(self) -> None:
        self.run_on_loop(self.store.poll_outcomes())

    @rule()
    def api_dies(self) -> None:
        self.run_on_loop(self.replace_api())

    async def replace_api(self) -> None:
        """Replace the API process. Its open writes are either committed or not by then, because the writer is closed
        first."""
        await self.writer.close()
        await asyncio.gather(*self.reading)
        self.open_api()

    @rule(client_index=INDEX, turns=st.integers(0, 3), value=st.integers(1, 3))
    def api_dies_before_it_answers(self, client_index: int, turns: int, value: int) -> None:
        """The API process dies; the client sends the same command to the next API process."""
        self.run_on_loop(self.send_while_api_dies(self.client(client_index), turns, value))

    async def send_while_api_dies(self, client: Client, turns: int, value: int) -> None:
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
        client.sent[number] = AcceptedCommand(request_id, kind, body, value)

    # What must hold

    async def drain(self) -> None:
        """Start the engine as often as it takes, and let everything run that can run."""
        while not self.engine.alive:
            await self.engine.start()
        assert await self.engine.find_lost_rings()
        assert await self.engine.turns(ALL)
        await self.store.poll_outcomes()

    @invariant()
    def outcomes_never_change(self) -> None:
        """The engine holds no model that no client has created."""
        if self.clients and self.engine.alive:
            assert set(self.engine.backend.models) <= {client.model_id for client in self.clients}

    async def check_all(self, client: Client) -> None:
        """Each command of the list has run once, in its order. Commands after a missing number wait."""
        expected, has_ended = Expected(client), False
        for sent in client.due():
            outcome = await self.poll(sent)
            assert outcome is not None, "the command runs even if other models wait"
            has_ended = has_ended or _is_gone(outcome)
            if has_ended:
                assert _is_gone(outcome), "no command runs after the end of its session"
            elif outcome.error == SKIPPED:
                assert self.deaths_while_running[sent.id] >= DEATHS_TO_BLAME
                has_ended = sent.kind is Kind.CREATE_MODEL
            else:
                assert outcome == expected.run(sent)
                assert self.deaths_while_running[sent.id] < DEATHS_TO_BLAME
        assert not has_ended or client.ended or client.sent[0].id in self.deaths_while_running
        for number in client.not_run:
            outcome = await self.poll(client.sent[number])
            assert outcome is not None
            assert _never_came(outcome) or "arrived after later commands" in str(outcome.error) or _is_gone(outcome)
        waiting = [
            sent for number, sent in client.sent.items() if number > client.missing[0] and number not in client.not_run
        ]
        for sent in waiting:
            outcome = await self.poll(sent)
            assert outcome is None or (_is_gone(outcome) and (has_ended or client.ended)), (
                "the command waits for a missing number"
            )
        assert (client.model_id in self.engine.backend.models) == (
            bool(expected.state) and not has_ended and not client.ended
        )
        if client.model_id in self.engine.backend.models:
            assert self.engine.backend.models[client.model_id] == expected.state


def _never_came(outcome: Outcome | None) -> bool:
    """Whether the command failed because an earlier number has not arrived."""
    return outcome is not None and outcome.error is not None and "has not arrived within" in outcome.error


def _is_gone(outcome: Outcome) -> bool:
    """Whether the command failed because its session or model has ended."""
    return outcome == SESSION_ENDED or (outcome.error is not None and "is not there any more" in outcome.error)


@pytest.fixture
def new_url(database_kind: str, request: pytest.FixtureRequest) -> Iterator[Callable[[Path], str]]:
    """A function that makes a migrated database for a state directory and returns its URL."""
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
def test_the_command_log_behaves_like_a_plain_list(
    new_url: Callable[[Path], str], database_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "SAFETY_POLL_S", NEVER_S)
    monkeypatch.setattr(CommandLog, "new_url", staticmethod(new_url), raising=False)
    run_state_machine_as_test(
        CommandLog,
        settings=settings(
            derandomize=not OTHER_EXAMPLES,
            max_examples=OTHER_EXAMPLES or EXAMPLES[database_kind],
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
            phases=[Phase.generate, Phase.shrink] if OTHER_EXAMPLES else [Phase.generate],
        ),
    )
