"""What the engine counts of its commands, with real parts."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
from engine_harness import Harness, Trainer, asleep, data, until

from skyrl.base.types.requests import Kind
from skyrl.base.wire.errors import ErrorCategory
from skyrl.engine.metrics import CommandMetrics
from skyrl.runtime.metrics.files import rendered
from skyrl.storage.db.quotas import ACTIVE_S, sizes


def shown(harness: Harness) -> dict[str, float]:
    text = rendered(harness.parts.metrics.registry.collect(), process="engine")
    found = re.findall(r'^(\w+)\{(.*?),?process="engine"\} (\S+)$', text, flags=re.M)
    return {f"{name}{{{labels}}}": float(value) for name, labels, value in found}


def policy_gradient(seed: int, length: int, offset: float) -> dict[str, Any]:
    """A pass whose sampler's logprobs are `offset` each."""
    (datum,) = data(seed, length)
    inputs = datum["loss_fn_inputs"]
    inputs["logprobs"] = {"data": [offset] * length, "dtype": "float32", "shape": [length]}
    inputs["advantages"] = {"data": [1.0] * length, "dtype": "float32", "shape": [length]}
    del inputs["weights"]
    return {"data": [datum], "loss_fn": "importance_sampling"}


async def test_commands_count_by_kind_and_outcome_with_their_times(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.result(trainer.creating or "")
    await asleep(harness.parts.signals)  # or a busy machine's engine finds each command before it is idle
    await trainer.result(await trainer.forward_backward(1, None, 12))
    await trainer.result(await trainer.optim_step())
    wrong = data(2, 12)
    wrong[0]["loss_fn_inputs"]["target_tokens"]["data"][3] = 512
    await trainer.fails(Kind.FORWARD, forward_input={"data": wrong, "loss_fn": "cross_entropy"})
    await until(lambda: not harness.scheduler.is_busy(trainer.model_id))
    found = shown(harness)
    ended = {series: value for series, value in found.items() if series.startswith("skyrl_commands_total") and value}
    assert ended == {
        'skyrl_commands_total{kind="create_model",outcome="ok"}': 1,
        'skyrl_commands_total{kind="forward_backward",outcome="ok"}': 1,
        'skyrl_commands_total{kind="optim_step",outcome="ok"}': 1,
        'skyrl_commands_total{kind="forward",outcome="user_error"}': 1,
    }
    for kind in ("create_model", "forward_backward", "optim_step", "forward"):
        assert found[f'skyrl_command_wait_seconds_count{{kind="{kind}"}}'] == 1
        assert found[f'skyrl_command_run_seconds_count{{kind="{kind}"}}'] == 1
        assert 0 < found[f'skyrl_command_wait_seconds_sum{{kind="{kind}"}}'] < 100, "not since 1970"
    assert found["skyrl_training_tokens_total{}"] == 12
    assert found["skyrl_pass_models_sum{}"] == found["skyrl_pass_models_count{}"] == 2
    for phase in ("pass", "step", "other", "idle"):
        assert found[f'skyrl_engine_busy_seconds_total{{phase="{phase}"}}'] > 0
    assert found['skyrl_engine_busy_seconds_total{phase="save"}'] == 0


async def test_the_gap_is_what_the_passs_own_metric_says(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.result(await trainer.forward_backward(1, None, 12))
    assert shown(harness)["skyrl_logprob_gap_nats_count{}"] == 0, "a loss without the sampler's logprobs has no gap"
    passed = await trainer.do(Kind.FORWARD_BACKWARD, forward_backward_input=policy_gradient(1, 12, -5.0))
    gap = passed["metrics"]["kl:mean"]
    assert gap != 0
    await until(lambda: shown(harness)["skyrl_logprob_gap_nats_count{}"] == 1)
    assert shown(harness)["skyrl_logprob_gap_nats_sum{}"] == pytest.approx(abs(gap))


async def test_a_gap_that_no_model_has_does_not_spoil_the_sum() -> None:
    metrics = CommandMetrics()
    metrics.passed(1, 10, [float("nan"), float("inf"), 1e38, -0.5])
    (family,) = metrics._gap.collect()
    assert {s.name: s.value for s in family.samples if s.name[-4:] in ("_sum", "ount")} == {
        "skyrl_logprob_gap_nats_sum": 0.5,
        "skyrl_logprob_gap_nats_count": 1,
    }


async def test_a_save_for_sampling_counts_its_time_and_its_bytes_on_their_way(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
    await trainer.do(Kind.SAVE_WEIGHTS, path="first")
    await until(lambda: shown(harness)['skyrl_commands_total{kind="save_weights",outcome="ok"}'] == 1)
    found = shown(harness)
    assert found["skyrl_weights_ready_seconds_count{}"] == 1
    assert found['skyrl_engine_busy_seconds_total{phase="save"}'] > 0


async def test_the_oldest_command_is_shown_while_it_runs_and_while_it_waits(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.result(trainer.creating or "")
    await until(lambda: harness.scheduler.oldest is None)
    harness.scheduler.hold(trainer.model_id)
    first = await trainer.forward_backward(1, None, 12)
    await harness.queued(1)
    assert harness.scheduler.oldest is None, "a held model's command could not run"
    harness.scheduler.release(trainer.model_id)
    accepted_at = harness.scheduler.oldest
    assert accepted_at is not None
    assert 0 <= time.time() - accepted_at < 100
    harness.engine.ring()
    await trainer.result(first)


async def test_a_command_that_hangs_in_the_backend_is_the_oldest(harness: Harness) -> None:
    """Then no other command need wait to make the age grow."""
    trainer = await Trainer.create(harness)
    metrics, ends = harness.parts.metrics.commands, threading.Event()
    await trainer.result(trainer.creating or "")
    await until(lambda: harness.scheduler.oldest is None and metrics.oldest_accepted_at is None)
    run = harness.backend.run

    def hang(passes: Any) -> Any:
        ends.wait()
        return run(passes)

    harness.backend.run = hang  # type: ignore[method-assign,assignment]
    command = await trainer.forward_backward(1, None, 12)
    try:
        await until(lambda: metrics.oldest_accepted_at is not None)
    finally:
        ends.set()
    await trainer.result(command)
    await until(lambda: metrics.oldest_accepted_at is None)


async def test_commands_that_are_refused_because_their_model_is_gone_are_counted(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    unloaded = await trainer.send(Kind.UNLOAD_MODEL, None)
    await trainer.result(unloaded)
    late = await trainer.send(Kind.OPTIM_STEP, 9)
    assert (await trainer.outcome(late)).error_category == ErrorCategory.USER
    await until(lambda: shown(harness)['skyrl_commands_total{kind="optim_step",outcome="user_error"}'] == 1)


async def test_the_numbers_of_rows_count_what_lives(harness: Harness) -> None:
    await Trainer.create(harness, tenant="one")
    await Trainer.create(harness, tenant="two")
    two = await Trainer.create(harness, tenant="two")
    await two.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    now = time.time()
    found = harness.database.read(lambda c: sizes(c, now))
    assert (found.models, found.sessions, found.tenants, found.adapters) == (3, 3, 2, 1)
    later = harness.database.read(lambda c: sizes(c, now + 2 * ACTIVE_S))
    assert (later.sessions, later.tenants) == (3, 0)
