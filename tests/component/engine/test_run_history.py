"""The history of runs: it says what the passes said, counts each step once, and stays bounded."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from engine_harness import Harness, Trainer, data
from sqlalchemy import event, func, select, update

from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import LoraSpec
from skyrl.storage.db import retention, run_steps
from skyrl.storage.db.database import Connection, Database
from skyrl.storage.db.models import Model, add_model
from skyrl.storage.db.retention import Retention
from skyrl.storage.db.run_steps import (
    Curves,
    SampledSums,
    Step,
    StepSums,
    add_passes,
    add_reward,
    add_samples,
    end_step,
    history,
    newest_steps,
)
from skyrl.storage.db.sessions import Sessions
from skyrl.storage.db.usage import usage
from skyrl.storage.db.writer import GroupCommitWriter
from tests.postgres_server import ON_BOTH


def steps_of(harness: Harness, trainer: Trainer) -> list[Step]:
    return harness.database.read(lambda c: history(c, trainer.model_id))


def datum_with_logprobs(seed: int, logprob: float = -3.0, active: int = 8) -> list[dict[str, Any]]:
    """One datum as a sampler gives it: logprobs at each of 8 positions, and advantages at the first `active`."""
    [datum] = data(seed, 8)
    inputs = datum["loss_fn_inputs"]
    del inputs["weights"]
    for name, values in (("logprobs", [logprob] * 8), ("advantages", [1.0] * active + [0.0] * (8 - active))):
        inputs[name] = {"data": values, "dtype": "float32", "shape": [8]}
    return [datum]


def weighted(seed: int, weights: list[float]) -> list[dict[str, Any]]:
    """One datum for cross_entropy with these weights."""
    [datum] = data(seed, len(weights))
    datum["loss_fn_inputs"]["weights"] = {"data": weights, "dtype": "float32", "shape": [len(weights)]}
    return [datum]


async def test_the_numbers_of_a_step_are_those_of_its_passes(harness: Harness) -> None:
    """The loss is one per weight; that of passes with advantages is no part of it."""
    trainer = await Trainer.create(harness)
    passes = [
        await trainer.do(
            Kind.FORWARD_BACKWARD,
            forward_backward_input={"data": datum_with_logprobs(seed, active=active), "loss_fn": "ppo"},
        )
        for seed, active in ((1, 8), (2, 2), (3, 0))
    ]
    plain = [
        await trainer.do(
            Kind.FORWARD_BACKWARD, forward_backward_input={"data": weighted(seed, weights), "loss_fn": "cross_entropy"}
        )
        for seed, weights in ((3, [0.0] * 7 + [1.0, 1.0]), (4, [0.0] * 13 + [0.25]), (5, [0.0] * 14))
    ]
    await trainer.do(
        Kind.FORWARD, forward_input={"data": data(4), "loss_fn": "cross_entropy"}
    )  # trains nothing, so it is not in the history
    assert steps_of(harness, trainer) == [], "the step has not ended"
    await trainer.result(await trainer.optim_step())
    [step] = steps_of(harness, trainer)
    losses, weights = ([one["metrics"][name] for one in plain] for name in ("loss:sum", "weights:sum"))
    assert weights == [2.0, 0.25, 0.0]
    assert step.loss == pytest.approx(sum(losses) / 2.25)
    assert all("weights:sum" not in one["metrics"] for one in passes)
    sums = {
        name: [one["metrics"][f"{name}:sum"] for one in passes] for name in ("active_tokens", "ratio", "kl", "clipped")
    }
    assert sums["active_tokens"] == [8.0, 2.0, 0.0]
    assert [numbers[2] for numbers in sums.values()] == [0.0] * 4
    for name, mean in (("ratio", "ratio"), ("kl", "kl"), ("clipped", "clip_fraction")):
        for one, total, active in zip(passes[:2], sums[name], (8, 2), strict=False):
            assert one["metrics"][f"{mean}:mean"] == pytest.approx(total / active)
        assert f"{mean}:mean" not in passes[2]["metrics"]
    assert step.ratio == pytest.approx(sum(sums["ratio"]) / 10)
    assert step.learning_rate == 0.01
    assert step.gap == pytest.approx(sum(sums["kl"]) / 10), "the cross-entropy pass has no logprobs of a sampler"
    assert step.clip_fraction == pytest.approx(sum(sums["clipped"]) / 10)
    assert (step.step, step.tokens) == (1, 8 + 8 + 8 + 9 + 14 + 14)
    assert step.active == pytest.approx(10 / 24), "of the tokens in passes with advantages"
    assert step.busy_s > 0


@ON_BOTH
async def test_sums_that_no_database_can_hold_are_left_out(
    database: Database, writer: GroupCommitWriter, run: str
) -> None:
    """Of each number there is one pass that says it, and there are others that say something beyond all bounds."""
    right = {"active_tokens:sum": 8.0, "weights:sum": 8.0, "loss:sum": 4.0, "kl:sum": 2.0, "clipped:sum": 4.0}
    right |= {"ratio:sum": 10.0}
    beyond = (math.inf, -math.inf, math.nan, 1e308, -1e308)
    wrong = [dict(list(right.items())[:2]) | dict.fromkeys(list(right)[2:], number) for number in beyond]
    wrong.append({"active_tokens:sum": 8.0, "weights:sum": 1e308, "loss:sum": 1.0})
    for metrics in (*wrong, right, *wrong):
        sums = StepSums.of_pass(8, metrics)
        await writer.transact(lambda c, sums=sums: add_passes(c, {run: sums + sums}, 1.0))
    await writer.transact(end_step(run, 0.0))
    [step] = database.read(lambda c: history(c, run))
    assert (step.loss, step.gap, step.clip_fraction, step.ratio) == (0.5, 0.25, 0.5, 1.25)
    assert step.tokens == 2 * 8 * 13


async def test_a_pass_with_logprobs_beyond_all_bounds_stops_no_engine(harness: Harness) -> None:
    """Such passes succeed: their loss is finite. Their distances from the trainer's logprobs are -inf and inf. The
    ratio is capped."""
    trainer = await Trainer.create(harness)
    for logprob, loss in ((3e38, "importance_sampling"), (-3e38, "ppo")):
        body = {"data": datum_with_logprobs(1, logprob), "loss_fn": loss}
        await trainer.do(Kind.FORWARD_BACKWARD, forward_backward_input=body)
    await trainer.result(await trainer.optim_step())
    [step] = steps_of(harness, trainer)
    assert (step.gap, step.loss) == (None, None)
    assert step.ratio is not None


async def test_a_step_without_logprobs_of_a_sampler_has_no_gap(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    [step] = steps_of(harness, trainer)
    assert (step.gap, step.clip_fraction, step.ratio) == (None, None, None)


async def test_a_step_with_negative_weights_has_no_loss(harness: Harness) -> None:
    """The SDK computes a loss of the client's own with cross_entropy, whose weights are then gradients."""
    trainer = await Trainer.create(harness)
    body = {"data": weighted(1, [0.5, -0.25, 1.0]), "loss_fn": "cross_entropy"}
    passed = await trainer.do(Kind.FORWARD_BACKWARD, forward_backward_input=body)
    assert "weights:sum" not in passed["metrics"]
    await trainer.result(await trainer.optim_step())
    assert [step.loss for step in steps_of(harness, trainer)] == [None]


@pytest.mark.parametrize("kind", [Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP])
async def test_a_step_counts_once_through_a_kill_and_a_recovery(harness: Harness, kind: Kind) -> None:
    """The engine dies before it stores the outcome of the pass or of the step. The next engine repeats every command of
    the model, because no snapshot was taken."""
    trainer = await Trainer.create(harness)
    for seed in (1, 2):
        await trainer.step(seed)
    before = steps_of(harness, trainer)
    if kind is Kind.FORWARD_BACKWARD:
        harness.kill_before_commit_of(lambda _: True)
        passed = await trainer.forward_backward(3, None, 9, 14)
    else:
        passed = await trainer.forward_backward(3, None, 9, 14)
        await trainer.result(passed)
        harness.kill_before_commit_of(lambda _: True)
    stepped = await trainer.optim_step()
    await harness.wait_until_killed()
    await harness.start()
    metrics = (await trainer.result(passed))["metrics"]
    await trainer.result(stepped)
    [*first, last] = steps_of(harness, trainer)
    assert first == before
    assert (last.step, last.tokens) == (3, 9 + 14)
    assert last.loss == pytest.approx(metrics["loss:sum"] / metrics["weights:sum"])
    assert harness.model_row(trainer.model_id).steps == 3
    used = harness.database.read(lambda c: c.execute(select(func.sum(usage.c.amount))).scalar_one())
    assert used == 2 * (9 + 14 + 12) + 9 + 14, "the tokens of no command are counted again"


async def test_a_failed_step_is_no_step(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.result(await trainer.forward_backward(1))
    await trainer.fails(Kind.OPTIM_STEP, adam_params={"learning_rate": "much"})
    assert steps_of(harness, trainer) == []
    assert harness.model_row(trainer.model_id).steps == 0


@pytest.fixture
def database(migrated_url: str) -> Iterator[Database]:
    database = Database(migrated_url)
    yield database
    database.close()


@pytest.fixture
async def run(database: Database, writer: GroupCommitWriter) -> str:
    """The id of a run in the database. No engine has it."""
    session = await Sessions(database, writer).create("tenant", [], None, "")
    model = Model(f"{session.id}:train:0", session.id, "tenant", "tiny", LoraSpec(4, 32.0, 1), None)
    await writer.transact(add_model(model, 0))
    return model.id


def train(connection: Connection, run: str, steps: int) -> None:
    for _ in range(steps):
        add_passes(connection, {run: StepSums.of_pass(8, {"loss:sum": 4.0, "weights:sum": 8.0})}, 0.5)
        end_step(run, 0.25)(connection)


@ON_BOTH
async def test_a_full_history_gets_sparse_where_it_is_old_and_stays_bounded(
    database: Database, writer: GroupCommitWriter, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_steps, "MAX_STEPS", 200)
    await writer.transact(lambda c: train(c, run, 300))
    numbers = [step.step for step in await database.read_async(lambda c: history(c, run))]
    assert numbers == list(range(2, 300, 2)) + [300], "the newest step is always kept"
    await writer.transact(lambda c: train(c, run, 540))
    kept = await database.read_async(lambda c: history(c, run))
    assert len(kept) <= 200 + run_steps.CHECK_EVERY
    assert [step.step for step in kept][-41:] == list(range(800, 841)), "complete since the last deletion"
    assert {(step.loss, step.tokens, step.busy_s) for step in kept} == {(0.5, 8, 0.75)}


@ON_BOTH
async def test_a_history_after_a_step_has_the_later_steps_alone(
    database: Database, writer: GroupCommitWriter, run: str
) -> None:
    await writer.transact(lambda c: train(c, run, 5))
    assert [step.step for step in await database.read_async(lambda c: history(c, run, 3))] == [4, 5]
    assert await database.read_async(lambda c: history(c, run, 5)) == []


@ON_BOTH
async def test_a_curve_is_read_again_only_after_a_step(
    database: Database, writer: GroupCommitWriter, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[str]] = []
    real = run_steps._curves
    monkeypatch.setattr(run_steps, "_curves", lambda c, ids: read.append([*ids]) or real(c, ids))
    curves = Curves()
    for steps, trains in ((1, True), (2, True), (2, False)):
        if trains:
            await writer.transact(lambda c: train(c, run, 1))
        shown = database.read(lambda c, steps=steps: curves.of(c, {run: steps}))
        assert [(point.step, point.loss) for point in shown[run]] == [(1, 0.5), (2, 0.5)][:steps]
    assert read == [[run], [run], []]


def test_few_curves_are_kept(monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
    monkeypatch.setattr(run_steps, "MAX_CURVES", 2)
    curves = Curves()
    for number in range(5):
        database.read(lambda c, number=number: curves.of(c, {f"run-{number}": 0}))
    assert len(curves) == 2


def test_the_bound_is_2000_steps_a_run() -> None:
    assert (run_steps.MAX_STEPS, run_steps.CHECK_EVERY) == (2_000, 100)


@ON_BOTH
async def test_steps_without_news_for_90_days_are_deleted(
    database: Database, writer: GroupCommitWriter, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FORGET_ROWS", 2)  # so that the sweep needs several transactions
    table, now, day_s = run_steps.steps, time.time(), 86_400.0

    def make_old(connection: Connection) -> None:
        train(connection, run, 8)
        for number, days in ((1, 200), (2, 91), (3, 91), (4, 91), (5, 91), (6, 89)):
            connection.execute(update(table).where(table.c.step == number).values(updated_at=now - days * day_s))

    await writer.transact(make_old)
    await Retention(database, writer, 100.0).sweep()
    assert [step.step for step in await database.read_async(lambda c: history(c, run))] == [6, 7, 8]


@ON_BOTH
async def test_a_step_has_the_samples_of_its_tenant_and_the_time_of_two_processes_once(
    database: Database, writer: GroupCommitWriter, run: str
) -> None:
    one = SampledSums(samples=8, truncated=2, surprise_sum=6.0, surprise_tokens=4)
    for sampling_s, until in ((2.0, 100.0), (2.0, 101.0), (5.0, 100.5), (0.5, 110.0)):
        sums = replace(one, sampling_s=sampling_s, sampling_until=until)
        await writer.transact(lambda c, sums=sums: add_samples(c, {(run, "tenant"): sums, (run, "other"): sums}))
    await writer.transact(lambda c: add_samples(c, {("deleted", "tenant"): one}))
    await writer.transact(lambda c: train(c, run, 2))
    first, second = database.read(lambda c: history(c, run))
    assert (first.samples, first.truncated, first.entropy) == (32, 0.25, 1.5)
    assert first.sampling_s == 2 + 1 + 0 + 0.5, "what another process has counted already counts once"
    assert (second.samples, second.truncated, second.entropy, second.sampling_s) == (0, None, None, 0)
    assert database.read(lambda c: newest_steps(c, run, 1)) == [second]


async def test_samples_of_many_runs_are_added_by_one_statement(
    database: Database, writer: GroupCommitWriter, run: str
) -> None:
    """The write lock is held meanwhile, every second."""
    sent: list[str] = []
    event.listen(database.writer, "before_cursor_execute", lambda *call: sent.append(call[2]))
    one = SampledSums(samples=1)
    others = {(f"another-{number}", "tenant"): one for number in range(100)}
    await writer.transact(lambda c: add_samples(c, {(run, "tenant"): one} | others))
    assert len([statement for statement in sent if "run_steps" in statement]) == 1
    await writer.transact(lambda c: train(c, run, 1))
    assert [step.samples for step in database.read(lambda c: history(c, run))] == [1]


@ON_BOTH
async def test_a_step_has_the_mean_of_its_rewards_and_its_wall_time(
    database: Database, writer: GroupCommitWriter, run: str
) -> None:
    def change(connection: Connection) -> None:
        add_passes(connection, {run: StepSums.of_pass(8, {}, [1.0, 0.0, 0.5])}, 0.5)
        add_passes(connection, {run: StepSums.of_pass(8, {}, [math.inf])}, 0.5)
        for tenant, reward in (("tenant", 1.0), ("tenant", 1e300), ("other", 1.0)):
            add_reward(connection, run, tenant, reward)
        end_step(run, 0.25)(connection)
        end_step(run, 0.25)(connection)

    await writer.transact(change)
    first, second = database.read(lambda c: history(c, run))
    assert (first.reward, second.reward) == (2.5 / 4, None)
    assert first.wall_s is None, "nothing says when the first step began"
    assert second.wall_s == pytest.approx(second.ended_at - first.ended_at)


@ON_BOTH
async def test_a_run_waits_while_the_trainer_works_for_others(
    database: Database, writer: GroupCommitWriter, run: str
) -> None:
    """Its passes ran for 3 s together with another's, which had three quarters of the tokens."""
    sums = {run: StepSums.of_pass(10, {}), "another": StepSums.of_pass(30, {})}
    await writer.transact(lambda c: add_passes(c, sums, 3.0, {run: 0.5}))
    await writer.transact(end_step(run, 0.25, wait_s=2.0))
    [step] = database.read(lambda c: history(c, run))
    assert (step.busy_s, step.wait_s) == (0.75 + 0.25, 0.5 + 2.25 + 2.0)


async def test_a_step_knows_its_saves(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
    await trainer.do(Kind.SAVE_WEIGHTS, path="state")
    await trainer.step(1)
    await trainer.step(2)
    first, second = steps_of(harness, trainer)
    assert first.save_s > 0
    assert (first.saves, second.saves, second.save_s) == (1, 0, 0)
    assert first.wait_s + second.wait_s > 0
    assert second.wall_s is not None
    assert second.busy_s + second.wait_s <= second.wall_s + 0.5
