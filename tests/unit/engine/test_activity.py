"""What the engine tells of itself: what each model with commands waits for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from skyrl.api.request_status.commands import of_command
from skyrl.base.types.activity import EngineActivity, RecoveryProgress, WaitsFor, decode_activity, encode_activity
from skyrl.base.types.requests import Command, Kind
from skyrl.engine import activity as activity_module
from skyrl.engine.activity import ActivityWatch, Holds
from skyrl.engine.metrics import CommandMetrics, ModelWaits, RunTimes
from skyrl.engine.scheduler import Scheduler
from skyrl.storage.db.models import PendingCommand

_numbers = itertools.count(1)


def command(
    seq: int | None, kind: Kind = Kind.FORWARD_BACKWARD, model: str = "m", start: float | None = None
) -> Command:
    row = next(_numbers)
    return Command(row, f"r{row}", kind, "tenant", "session", model, seq, None, None, "json", 100, start)


class World:
    """A scheduler, and a watch over it with a clock that the test sets."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(1_000_000)
        self.run_times = RunTimes()
        self.holds = Holds()
        self.inference_ready = True
        self.registry = CollectorRegistry()
        self.now = 1_000.0
        self.watch = ActivityWatch(
            self.scheduler,
            self.run_times,
            self.holds,
            lambda: self.inference_ready,
            CommandMetrics(self.registry),
            lambda: self.now,
        )

    def look(self) -> EngineActivity:
        self.watch.look()
        assert decode_activity(self.watch.text) == self.watch.now, "the API reads the same"
        return self.watch.now

    def waits(self, model_id: str = "m") -> tuple[WaitsFor, int | None, int]:
        """What the model waits for, the number of that command, and how many commands wait."""
        model = self.look().models[model_id]
        return model.waits_for, model.seq_id, model.waiting


@pytest.fixture
def world() -> World:
    return World()


def test_a_model_without_commands_is_not_told_of(world: World) -> None:
    world.scheduler.open_model("m")
    assert world.look() == EngineActivity()


def test_a_command_waits_for_its_turn_then_runs_and_the_next_one_waits(world: World) -> None:
    world.scheduler.add(command(0))
    world.scheduler.add(command(1, Kind.OPTIM_STEP))
    assert world.waits() == (WaitsFor.TURN, 0, 2)
    taken = world.scheduler.take_passes(["m"])
    world.now += 5
    assert world.waits() == (WaitsFor.NOTHING, 0, 1)
    assert world.look().models["m"].since == world.now
    world.now += 5
    assert world.look().models["m"].since == world.now - 5, "the wait goes on"
    world.scheduler.finish(taken)
    assert world.waits() == (WaitsFor.TURN, 1, 1)
    assert world.look().models["m"].since == world.now


def test_the_metrics_count_the_waiting_commands_by_reason(world: World) -> None:
    def gauge(reason: str) -> float | None:
        return world.registry.get_sample_value("skyrl_commands_waiting", {"reason": reason})

    for seq in range(3):
        world.scheduler.add(command(seq))
    world.scheduler.add(command(5, model="gap"))
    world.look()
    assert (gauge("turn"), gauge("gap"), gauge("quota")) == (3, 1, 0)
    taken = world.scheduler.take_passes(["m"])
    world.look()
    assert gauge("turn") == 3 - len(taken)
    assert gauge("nothing") is None


def test_while_an_unload_runs_no_numbered_command_counts_as_running(world: World) -> None:
    world.scheduler.add(command(None, Kind.UNLOAD_MODEL))
    world.scheduler.take_exclusive(["m"])
    world.scheduler.add(command(0))
    model = world.look().models["m"]
    assert (model.waits_for, model.kind, model.seq_id) == (WaitsFor.NOTHING, "UNLOAD_MODEL", None)
    waiting = PendingCommand(Kind.FORWARD_BACKWARD, "tenant", "m", 0, [])
    assert "unload_model began" in of_command(waiting, world.watch.now, world.now).sentence


def test_a_missing_command_is_named(world: World) -> None:
    for seq in (1, 2):
        world.scheduler.add(command(seq))
    assert world.waits() == (WaitsFor.GAP, 0, 2)


def test_a_delayed_command_waits_for_the_quota_and_later_ones_behind_it(world: World) -> None:
    world.scheduler.add(command(0, start=1_030.0))
    world.scheduler.add(command(1))
    assert world.waits() == (WaitsFor.QUOTA, 0, 2)
    assert world.look().models["m"].starts_at == 1_030.0


def test_behind_a_gap_a_delayed_command_waits_for_the_missing_one(world: World) -> None:
    world.scheduler.add(command(1, start=1_030.0))
    assert world.waits() == (WaitsFor.GAP, 0, 1)


def test_a_model_waits_for_its_restoration_and_for_what_that_waits_for(world: World) -> None:
    world.scheduler.add(command(0))
    world.scheduler.hold("m")
    world.holds.models.add("m")
    world.holds.begin(3)
    world.holds.repeated()
    assert world.look().recovery == RecoveryProgress(1, 3)
    assert world.waits()[0] is WaitsFor.RECOVERY
    world.holds.reasons["m"] = WaitsFor.STORE
    assert world.waits()[0] is WaitsFor.STORE
    world.holds.end()
    assert world.look().recovery is None
    assert world.waits()[0] is WaitsFor.STORE, "held models are restored later"


def test_the_inference_server_is_away_since_the_first_look_without_it(world: World) -> None:
    assert world.look().inference_away_since is None
    world.inference_ready = False
    world.look()
    world.now += 7
    assert world.look().inference_away_since == 1_000.0
    world.inference_ready = True
    assert world.look().inference_away_since is None


def test_the_text_has_a_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_module, "MAX_MODELS", 3)
    for number in range(3):
        world.scheduler.add(command(0, model=f"old{number}"))
    world.look()
    world.now += 1
    world.scheduler.add(command(0, model="new"))
    assert set(world.look().models) == {"old0", "old1", "old2"}, "the longest waiting ones are told of"


def test_an_activity_of_another_version_is_empty() -> None:
    assert decode_activity(None) == decode_activity('{"models": 3}') == decode_activity("") == EngineActivity()
    assert decode_activity(encode_activity(EngineActivity(samples_waiting=2))).samples_waiting == 2


def test_run_times_are_means_by_kind_and_passes_count_by_their_size() -> None:
    times = RunTimes()
    small, large, step = command(0), command(1), command(2, Kind.OPTIM_STEP)
    assert times.total([small]) is None, "nothing has run"
    times.ran([small, large], 4.0)
    times.ran([step], 1.0)
    assert times.means() == {"FORWARD_BACKWARD": 2.0, "OPTIM_STEP": 1.0}
    assert times.total([small, step]) == pytest.approx(3.0)
    times.ran([step], 9.0)
    assert times.means()["OPTIM_STEP"] == pytest.approx(2.0), "the newest run weighs an eighth"
    assert times.total([small, command(3, Kind.SAVE_WEIGHTS)]) is None, "no save has run"


def test_a_command_waits_from_its_arrival_or_from_the_end_of_the_models_command_before() -> None:
    waits = ModelWaits()
    first, second = (replace(command(number), accepted_at=100.0 + number) for number in (1, 2))
    other = replace(command(1, model="other"), accepted_at=103.0)
    assert waits.began([first, second, other], 105.0) == {"m": 4.0, "other": 2.0}, "the time of both passes counts once"
    waits.ended([first, second], 110.0)
    assert waits.began([replace(command(3), accepted_at=104.0)], 111.0) == {"m": 1.0}
    assert waits.began([replace(command(4), accepted_at=120.0)], 119.0) == {"m": 0.0}, "clocks may differ"
