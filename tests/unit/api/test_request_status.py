"""Where a request stands: one sentence for each thing that a request can wait for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from skyrl.api.request_status.commands import of_command
from skyrl.api.request_status.finding import of_colocated, of_elsewhere, of_forwarded
from skyrl.api.request_status.status import duration
from skyrl.base.types.activity import EngineActivity, ModelActivity, WaitsFor
from skyrl.base.types.requests import Kind
from skyrl.sampling.retries import SampleProgress, SampleWait
from skyrl.storage.db.models import PendingCommand

NOW = 1_000.0
PASS, STEP = Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP
RUN_S = {PASS: 4.0, STEP: 1.0}


def command(seq_id: int | None = 7, before: Sequence[Kind] = (), kind: Kind = PASS) -> PendingCommand:
    return PendingCommand(kind, "me", "mine", seq_id, [*before])


def model(
    waits_for: WaitsFor, *, tenant: str = "me", waiting: int = 1, work_s: float | None = 4.0, **values: object
) -> ModelActivity:
    given = {"since": NOW - 12, "kind": str(PASS), "seq_id": 7} | values
    return ModelActivity(tenant, waits_for, waiting=waiting, work_s=work_s, **given)  # type: ignore[arg-type]


def turns(before: Sequence[Kind] = (), /, **others: ModelActivity) -> str:
    """The sentence of a command that waits for its turn beside other models."""
    models = {"mine": model(WaitsFor.TURN)} | others
    status = of_command(command(before=before), EngineActivity(models, run_s=RUN_S), NOW)  # type: ignore[arg-type]
    assert status.state == "paused_capacity"
    return status.sentence


@pytest.mark.parametrize(
    ("waits_for", "state", "sentence"),
    [
        (WaitsFor.NOTHING, "active", "forward_backward (command 7) began 12 s ago"),
        (WaitsFor.TURN, "paused_capacity", "forward_backward (command 7) is next"),
        (
            WaitsFor.GAP,
            "paused_capacity",
            "command 7 of this model has not arrived, and 1 later command waits for it: the client has not sent it, or "
            "still sends it",
        ),
        (
            WaitsFor.QUOTA,
            "paused_rate_limit",
            "the tokens of this minute are used up; forward_backward (command 7) starts in about 30 s",
        ),
        (WaitsFor.RECOVERY, "paused_capacity", "the trainer has restarted, and restores this model"),
        (
            WaitsFor.STORE,
            "paused_capacity",
            "the trainer has restarted, and cannot reach the checkpoint store to restore this model",
        ),
        (
            WaitsFor.MEMORY,
            "paused_capacity",
            "the trainer has restarted, and waits for memory to restore this model",
        ),
        (
            WaitsFor.FILES,
            "paused_capacity",
            "the trainer has restarted, and cannot read or write the files that restore this model",
        ),
        (
            WaitsFor.SETTINGS,
            "paused_capacity",
            "the trainer has restarted with settings that do not allow this model; its log has more",
        ),
    ],
)
def test_a_command_says_what_it_waits_for(waits_for: WaitsFor, state: str, sentence: str) -> None:
    activity = EngineActivity({"mine": model(waits_for, starts_at=NOW + 30)})
    status = of_command(command(), activity, NOW)
    assert (status.state, status.sentence) == (state, sentence)


def test_everything_that_a_model_can_wait_for_has_a_sentence_without_the_tenants_name() -> None:
    for waits_for in WaitsFor:
        theirs = {"theirs": model(waits_for, tenant="secret")}
        status = of_command(command(), EngineActivity(theirs | {"mine": model(waits_for)}), NOW)
        assert status.sentence
        assert "secret" not in status.sentence
        assert "theirs" not in status.sentence


def test_a_command_behind_its_own_models_running_command_is_active() -> None:
    """The SDK sends a pass and a step together. Both have one state, or the SDK would never log a real pause."""
    running = EngineActivity({"mine": model(WaitsFor.NOTHING)})
    status = of_command(command(8, [PASS], STEP), running, NOW)
    assert status.state == "active"
    assert status.sentence == ("1 earlier command of this model first: forward_backward (command 7) began 12 s ago")


def test_merged_passes_of_one_model_all_run() -> None:
    merged = EngineActivity({"mine": model(WaitsFor.NOTHING, seq_id=9)})
    assert of_command(command(8, [PASS]), merged, NOW).sentence == "forward_backward (command 8) began 12 s ago"


def test_a_command_behind_earlier_commands_says_what_they_wait_for() -> None:
    limited = EngineActivity({"mine": model(WaitsFor.QUOTA, starts_at=NOW + 30)})
    status = of_command(command(9, [PASS, STEP]), limited, NOW)
    assert status.state == "paused_rate_limit"
    assert status.sentence == (
        "2 earlier commands of this model first: the tokens of this minute are used up; forward_backward (command 7) "
        "starts in about 30 s"
    )


def test_other_tenants_and_other_models_of_the_tenant_are_counted() -> None:
    sentence = turns(
        theirs=model(WaitsFor.NOTHING, tenant="b", waiting=2, work_s=12.0),
        idle=model(WaitsFor.GAP, tenant="c", waiting=9),
        also_mine=model(WaitsFor.TURN, waiting=3, work_s=3.0),
    )
    assert sentence == (
        "forward_backward (command 7) takes turns with 1 other tenant with 3 commands and 1 other model of yours with "
        "3 commands; about 5 s"
    ), "one command of 4 s of the tenant, and one of 1 s of the model"


def test_while_earlier_commands_run_every_other_tenant_gets_as_much() -> None:
    others = {"b": model(WaitsFor.TURN, tenant="b", waiting=9, work_s=36.0), "c": model(WaitsFor.TURN, tenant="c")}
    assert turns([PASS, STEP], **others).endswith("2 other tenants with 10 commands; about 14 s"), "5 s, 5 s and 4 s"


def test_there_is_no_estimate_before_every_kind_of_command_has_run() -> None:
    unknown = {"b": model(WaitsFor.TURN, tenant="b", work_s=None)}
    assert turns(**unknown).endswith("takes turns with 1 other tenant with 1 command")
    known = {"b": model(WaitsFor.TURN, tenant="b")}
    assert turns([Kind.SAVE_WEIGHTS], **known).endswith("takes turns with 1 other tenant with 1 command")


def test_a_command_that_the_engine_has_not_told_of_is_about_to_begin() -> None:
    status = of_command(command(None, kind=Kind.UNLOAD_MODEL), EngineActivity(), NOW)
    assert (status.state, status.sentence) == ("active", "unload_model is about to begin")


@pytest.mark.parametrize(
    ("waits_for", "state", "words"),
    [
        (None, "active", "the inference server has had the sample for 34 s"),
        (SampleWait.AWAY, "paused_capacity", "has been away for 34 s"),
        (SampleWait.BUSY, "paused_capacity", "takes no more samples at the moment"),
        (SampleWait.LOADING, "paused_capacity", "its adapter is being loaded"),
        (SampleWait.TURN, "paused_capacity", "this one waits its turn, for 34 s"),
        (SampleWait.SUSPECTS, "paused_capacity", "are sent again one after another"),
    ],
)
def test_a_sample_says_what_it_waits_for(waits_for: SampleWait | None, state: str, words: str) -> None:
    status = of_forwarded(SampleProgress(waits_for, 34.0, has_adapter=True), adapters=4, places=4)
    assert status.state == state
    assert words in status.sentence


def test_with_more_adapters_than_places_a_sample_may_wait_for_a_place() -> None:
    waits = SampleProgress(None, 34.0, has_adapter=True)
    status = of_forwarded(waits, adapters=6, places=4)
    assert status.state == "paused_capacity"
    assert "from 6 adapters are in flight, and the inference server runs 4 at a time" in status.sentence
    assert of_forwarded(SampleProgress(None, 34.0, has_adapter=False), 6, 4).state == "active", "the base model"
    assert of_forwarded(waits, 6, None).state == "active", "a server that skyrl does not run"


def test_a_sample_that_another_process_forwards_waits_while_the_inference_server_is_away() -> None:
    assert of_elsewhere(EngineActivity(), NOW).state == "active"
    away = of_elsewhere(EngineActivity(inference_away_since=NOW - 20), NOW)
    assert (away.state, "has been away for 20 s" in away.sentence) == ("paused_capacity", True)


def test_a_colocated_sample_waits_while_the_trainer_has_the_device() -> None:
    trains = EngineActivity({"m": model(WaitsFor.NOTHING, tenant="b")}, samples_waiting=3)
    assert "3 samples wait until a turn of training ends" in of_colocated(trains).sentence
    assert of_colocated(EngineActivity(samples_waiting=3)).state == "active"


def test_durations_are_short() -> None:
    assert [duration(s) for s in (0, 1.4, 119, 120, 3600, 7199, 7200)] == [
        "1 s",
        "1 s",
        "119 s",
        "2 min",
        "60 min",
        "120 min",
        "2.0 h",
    ]
