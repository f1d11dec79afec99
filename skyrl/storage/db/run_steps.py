"""The history of each run, step by step: loss, reward, trainer/sampler gap, samples, learning rate, tokens and time. It
outlives the results.

The passes of a step, its saves and its end are added in the transactions that store their outcomes, so that each counts
once, also through restarts. API processes add samples about once a second, to the step that is open then. A run keeps
at most MAX_STEPS steps: when it is full, every second step is deleted, so that old steps get sparse. Steps since the
last deletion are complete.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Generic, Self, TypeVar

from cachetools import LRUCache
from sqlalchemy import Connection, bindparam, delete, func, select, text, update

from skyrl.storage.db.database import Change
from skyrl.storage.db.tables import ModelRow, RunStepRow

T = TypeVar("T")
steps = RunStepRow.__table__  # type: ignore[attr-defined]
_models = ModelRow.__table__  # type: ignore[attr-defined]

MAX_STEPS = 2_000
CHECK_EVERY = 100
"""Whether a run is full is looked at every so many steps: it may have that many more than MAX_STEPS."""
MAX_SUM = 1e30
"""In absolute value, of one pass. So the sums of a step stay finite: PostgreSQL refuses larger ones than a double
holds, and SQLite stores a sum that is no number as NULL."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums over forward_backward passes. `tokens` are all tokens of their data. `loss_weight` is the sum of the weights
    of the passes whose loss is in `loss_sum`: those with weights (of cross_entropy), none of them negative. The gap is
    a sum over `gap_tokens` (those with an advantage), as the trainer's metrics count them, in nats; so are the clipped
    tokens and the ratio. `advantage_tokens` are all tokens of passes with advantages. `reward_sum` is a sum over
    `rewards` sequences that have come with one."""

    passes: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    loss_weight: float = 0.0
    gap_sum: float = 0.0
    gap_tokens: int = 0
    clipped_sum: float = 0.0
    clipped_tokens: int = 0
    ratio_sum: float = 0.0
    ratio_tokens: int = 0
    advantage_tokens: int = 0
    reward_sum: float = 0.0
    rewards: int = 0

    @classmethod
    def of_pass(cls, tokens: int, metrics: Mapping[str, float], rewards: Sequence[float] = ()) -> Self:
        """The sums of one pass with the trainer's metrics (`name:reduction`), and the rewards of its sequences, if its
        inputs have them. A number beyond MAX_SUM counts as none: a client can cause it with logprobs that no model
        gives."""
        counted = round(metrics.get("active_tokens:sum", 0.0))

        def summed(name: str) -> tuple[float, int]:
            total = metrics.get(name)
            return (0.0, 0) if total is None or not abs(total) <= MAX_SUM else (total, counted)

        sums = (*_weighted(metrics), *summed("kl:sum"), *summed("clipped:sum"), *summed("ratio:sum"))
        advantages = tokens if "active_tokens:sum" in metrics else 0
        total = sum(rewards)
        return cls(1, tokens, *sums, advantages, *((total, len(rewards)) if abs(total) <= MAX_SUM else (0.0, 0)))

    def __add__(self, other: Self) -> StepSums:
        mine, theirs = asdict(self), asdict(other)
        return StepSums(**{name: mine[name] + theirs[name] for name in mine})


def _weighted(metrics: Mapping[str, float]) -> tuple[float, float]:
    """The loss of a pass and the sum of its weights; of a pass that has no weight, or only 0, neither. The losses of
    other passes are sums over advantages, of which no mean says anything."""
    loss, weights = metrics.get("loss:sum", 0.0), metrics.get("weights:sum", 0.0)
    return (loss, weights) if abs(loss) <= MAX_SUM and 0 < weights <= MAX_SUM else (0.0, 0.0)


@dataclass(slots=True)
class SampledSums:
    """Sums over the samples of a run's weights that have ended: `samples` sequences, of which `truncated` ended at
    their bound of tokens. `surprise_sum` is the sum of -logprob over `surprise_tokens` sampled tokens. For `sampling_s`
    seconds until `sampling_until` (since the epoch) at least one of them was in flight."""

    samples: int = 0
    truncated: int = 0
    surprise_sum: float = 0.0
    surprise_tokens: int = 0
    sampling_s: float = 0.0
    sampling_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a run. `busy_s`: the trainer's time for its passes and steps; of passes that ran together with others'
    its part. `wait_s`: a command had arrived and none of the run's was worked on, or others' passes ran beside its own.
    `save_s`: of its saves and loads. `saves`: of weights to sample from."""

    busy_s: float = 0.0
    wait_s: float = 0.0
    save_s: float = 0.0
    saves: int = 0


_PASSED, _SAMPLED, _SPENT = ([field.name for field in fields(of)] for of in (StepSums, SampledSums, Spent))
_NONE: dict[str, Any] = dict.fromkeys((*_PASSED, *_SAMPLED, *_SPENT), 0)
Tenanted = tuple[str, str]
"""The id of a model, and a tenant who has sampled from it."""
_PLAIN = [name for name in _NONE if name not in ("sampling_s", "sampling_until")]
_ADD = text(
    f"INSERT INTO run_steps (model_id, step, updated_at, ended_at, {', '.join(_NONE)}) "
    f"SELECT id, steps + 1, :at, NULL, {', '.join(':' + name for name in _NONE)} "
    "FROM models WHERE id = :model_id AND tenant = COALESCE(:tenant, tenant) "
    "ON CONFLICT (model_id, step) DO UPDATE SET updated_at = excluded.updated_at, "
    + ", ".join(f"{name} = run_steps.{name} + excluded.{name}" for name in _PLAIN)
    + ", sampling_s = run_steps.sampling_s + CASE "
    "WHEN excluded.sampling_until <= run_steps.sampling_until THEN 0 "
    "WHEN excluded.sampling_until - run_steps.sampling_until < excluded.sampling_s "
    "THEN excluded.sampling_until - run_steps.sampling_until ELSE excluded.sampling_s END, "
    "sampling_until = CASE WHEN excluded.sampling_until > run_steps.sampling_until "
    "THEN excluded.sampling_until ELSE run_steps.sampling_until END"
)
"""Adds to the open step of a model, which it makes if there is none; if a tenant is named, only to its own model. Time
in which several API processes have samples of the run in flight counts once: at most the time since the latest one that
was added."""


def _add(connection: Connection, added: Mapping[tuple[str, str | None], dict[str, Any]]) -> None:
    """Add to the open steps, by model id, and by tenant if only its own models count: in one order, so that two writers
    cannot deadlock, and in one statement, because thousands of runs may have samples in a second."""
    nothing = {"at": time.time()} | _NONE
    runs = sorted(added, key=lambda run: run[0])
    if runs:
        connection.execute(_ADD, [nothing | {"model_id": run[0], "tenant": run[1]} | added[run] for run in runs])


def add_passes(
    connection: Connection, trained: Mapping[str, StepSums], busy_s: float, waits: Mapping[str, float] | None = None
) -> None:
    """Add passes, by model id, to the open steps. `busy_s` is the time of all of them together; a model's part of it is
    its part of the tokens, and in the rest it waits. `waits`: by model id, how long its passes had waited."""
    tokens = sum(sums.tokens for sums in trained.values())
    shares = {model_id: busy_s * sums.tokens / max(1, tokens) for model_id, sums in trained.items()}
    spent = {
        model_id: Spent(share, (waits or {}).get(model_id, 0.0) + busy_s - share) for model_id, share in shares.items()
    }
    _add(connection, {(model_id, None): asdict(sums) | asdict(spent[model_id]) for model_id, sums in trained.items()})


def add_samples(connection: Connection, sampled: Mapping[Tenanted, SampledSums]) -> None:
    """Add samples, by model and tenant. Those of another tenant than the model's are left out: a run shows nothing of
    who samples from its published checkpoints."""
    _add(connection, {(model_id, tenant): asdict(sums) for (model_id, tenant), sums in sampled.items()})


def add_reward(connection: Connection, model_id: str, tenant: str, reward: float) -> None:
    """Add the reward that a tenant gave its agent's session with the model's weights. That of another tenant than the
    model's is left out, as its samples are."""
    if abs(reward) <= MAX_SUM:
        _add(connection, {(model_id, tenant): {"reward_sum": reward, "rewards": 1}})


def add_save(model_id: str, spent: Spent) -> Change:
    """A change that adds the time of a save or a load."""
    return lambda connection: _add(connection, {(model_id, None): asdict(spent)})


def end_step(model_id: str, busy_s: float, learning_rate: float | None = None, wait_s: float = 0.0) -> Change:
    """A change that ends the open step of a model with an optimizer step, which took `busy_s` and had waited `wait_s`.
    `learning_rate` is None if the step had no gradient."""

    def change(connection: Connection) -> None:
        now = time.time()
        _add(connection, {(model_id, None): asdict(Spent(busy_s, wait_s))})
        number = connection.execute(
            update(_models).where(_models.c.id == model_id).values(steps=_models.c.steps + 1).returning(_models.c.steps)
        ).scalar_one()
        before = select(steps.c.ended_at).where(steps.c.model_id == model_id, steps.c.step == number - 1)
        began = connection.execute(before).scalar()
        ended = (steps.c.model_id == model_id) & (steps.c.step == number)
        wall_s = None if began is None else max(0.0, now - began)
        connection.execute(update(steps).where(ended).values(ended_at=now, learning_rate=learning_rate, wall_s=wall_s))
        if number % CHECK_EVERY == 0:
            _halve_if_full(connection, model_id)

    return change


def _halve_if_full(connection: Connection, model_id: str) -> None:
    numbers = list(
        connection.execute(select(steps.c.step).where(steps.c.model_id == model_id).order_by(steps.c.step)).scalars()
    )
    if len(numbers) <= MAX_STEPS:
        return
    one = delete(steps).where(steps.c.model_id == model_id, steps.c.step == bindparam("number"))
    connection.execute(one, [{"number": number} for number in numbers[:-1:2]])


def forget(connection: Connection, before: float, limit: int) -> int:
    """Delete steps that were last changed before `before` (seconds since the epoch): at most `limit`. Returns the
    number of deleted steps."""
    old = connection.execute(
        select(steps.c.model_id, steps.c.step).where(steps.c.updated_at < before).limit(limit)
    ).all()
    one = delete(steps).where(steps.c.model_id == bindparam("model"), steps.c.step == bindparam("number"))
    if old:
        connection.execute(one, [{"model": model_id, "number": number} for model_id, number in old])
    return len(old)


@dataclass(frozen=True, slots=True)
class Step:
    """One step that has ended. `loss` is the mean per weight: sum(weight * -logprob) / sum(weight). Over all tokens
    with an advantage, `gap` is the mean of `kl` in nats, `ratio` that of the ratio, `clip_fraction` the part that was
    clipped. Each is None where no pass had such a number. `busy_s` is the trainer's time for the step.

    `reward` is the mean of the rewards that the server got. `active`: the part of the tokens in passes with advantages
    whose advantage is not 0. `truncated`: the part of `samples` (sequences) that ended at their bound of tokens.
    `entropy` is the mean of -logprob of the sampled tokens in nats: an estimate, without bias, of the mean entropy of
    the distributions that they were drawn from, with temperature and cuts. `wall_s` is the time since the step before
    ended, None if that is not known; the other times are parts of it, which may overlap: see `Spent`, `SampledSums`."""

    step: int
    ended_at: float
    passes: int
    tokens: int
    loss: float | None
    gap: float | None
    clip_fraction: float | None
    ratio: float | None
    learning_rate: float | None
    busy_s: float
    reward: float | None
    active: float | None
    samples: int
    truncated: float | None
    entropy: float | None
    wall_s: float | None
    sampling_s: float
    wait_s: float
    save_s: float
    saves: int

    @classmethod
    def of(cls, row: Any) -> Self:
        return cls(
            step=row.step,
            ended_at=row.ended_at,
            passes=row.passes,
            tokens=row.tokens,
            loss=_mean(row.loss_sum, row.loss_weight),
            gap=_mean(row.gap_sum, row.gap_tokens),
            clip_fraction=_mean(row.clipped_sum, row.clipped_tokens),
            ratio=_mean(row.ratio_sum, row.ratio_tokens),
            learning_rate=row.learning_rate,
            busy_s=row.busy_s,
            reward=_mean(row.reward_sum, row.rewards),
            active=_mean(row.gap_tokens, row.advantage_tokens),
            samples=row.samples,
            truncated=_mean(row.truncated, row.samples),
            entropy=_mean(row.surprise_sum, row.surprise_tokens),
            wall_s=row.wall_s,
            sampling_s=row.sampling_s,
            wait_s=row.wait_s,
            save_s=row.save_s,
            saves=row.saves,
        )


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None


def history(connection: Connection, model_id: str, after: int = 0) -> list[Step]:
    """The steps of a model after the step `after` that have ended, in their order."""
    ended = (steps.c.model_id == model_id, steps.c.step > after, steps.c.ended_at.is_not(None))
    query = select(steps).where(*ended).order_by(steps.c.step)
    return [Step.of(row) for row in connection.execute(query)]


def newest_steps(connection: Connection, model_id: str, number: int) -> list[Step]:
    """The last `number` steps of a model that have ended, in their order."""
    ended = (steps.c.model_id == model_id, steps.c.ended_at.is_not(None))
    query = select(steps).where(*ended).order_by(steps.c.step.desc()).limit(number)
    return [Step.of(row) for row in connection.execute(query)][::-1]


def last_steps(connection: Connection, model_ids: list[str]) -> dict[str, Step]:
    """By model id, the last step that has ended."""
    ended = (steps.c.model_id.in_(model_ids), steps.c.ended_at.is_not(None))
    last = select(steps.c.model_id, func.max(steps.c.step).label("step")).where(*ended).group_by(steps.c.model_id)
    newest = last.subquery()
    query = select(steps).join(newest, (steps.c.model_id == newest.c.model_id) & (steps.c.step == newest.c.step))
    return {row.model_id: Step.of(row) for row in connection.execute(query)}


CURVE_POINTS = 40
"""The most points of a curve."""
_CURVES = text(
    "SELECT model_id, MAX(step) AS step, SUM(loss_sum) AS loss_sum, SUM(loss_weight) AS loss_weight, "
    "SUM(gap_sum) AS gap_sum, SUM(gap_tokens) AS gap_tokens "
    "FROM run_steps JOIN models ON models.id = model_id WHERE model_id IN :models AND ended_at IS NOT NULL "
    f"GROUP BY model_id, (step - 1) / ((models.steps - 1) / {CURVE_POINTS} + 1) ORDER BY model_id, step"
).bindparams(bindparam("models", expanding=True))


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Some steps of a run that follow each other, as means: `step` is the last of them."""

    step: int
    loss: float | None
    gap: float | None


def _curves(connection: Connection, model_ids: Sequence[str]) -> dict[str, list[CurvePoint]]:
    """By model id, its whole history in at most CURVE_POINTS points: none without a step."""
    found: dict[str, list[CurvePoint]] = {model_id: [] for model_id in model_ids}
    for row in connection.execute(_CURVES, {"models": [*model_ids]}) if model_ids else ():
        loss, gap = _mean(row.loss_sum, row.loss_weight), _mean(row.gap_sum, int(row.gap_tokens))
        point = CurvePoint(row.step, loss, gap)
        found[row.model_id].append(point)
    return found


MAX_CURVES = 500
"""The most runs whose curves, or other things of their steps, are kept: some 5 MB."""


class UntilAStepEnds(Generic[T]):
    """What is read from the steps of runs, kept until a step ends: reading a full history takes milliseconds, and a
    page asks every two seconds. Beyond MAX_CURVES, the one that was asked for longest ago is forgotten. Any thread may
    ask. `read` gives it by the ids of models."""

    def __init__(self, read: Callable[[Connection, Sequence[str]], Mapping[str, T]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._kept: LRUCache[str, tuple[int, T]] = LRUCache(MAX_CURVES)

    def of(self, connection: Connection, steps_of: Mapping[str, int]) -> dict[str, T]:
        """By model id, what belongs to each model in `steps_of`, which has the number of its steps."""
        with self._lock:
            found = {
                model: kept[1]
                for model, ended in steps_of.items()
                if (kept := self._kept.get(model)) and kept[0] == ended
            }
        found |= self._read(connection, sorted(steps_of.keys() - found.keys()))
        with self._lock:
            for model, ended in steps_of.items():
                self._kept[model] = (ended, found[model])
        return found

    def __len__(self) -> int:
        return len(self._kept)


class Curves(UntilAStepEnds[list[CurvePoint]]):
    """Curves of runs."""

    def __init__(self) -> None:
        super().__init__(lambda connection, ids: _curves(connection, ids))
