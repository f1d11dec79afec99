"""The history of each run, step by step: loss, trainer/sampler gap, learning rate, tokens and time. It outlives the
results.

The passes of a step and its end are added in the transactions that store their outcomes, so that each counts once,
also through restarts. A run keeps at most MAX_STEPS steps: when it is full, every second step is deleted, so that old
steps get sparse. Steps since the last deletion are complete.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from sqlalchemy import Connection, bindparam, delete, func, select, text, update

from skyrl.storage.db.database import Change
from skyrl.storage.db.tables import ModelRow, RunStepRow

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
    tokens and the ratio."""

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

    @classmethod
    def of_pass(cls, tokens: int, metrics: Mapping[str, float]) -> Self:
        """The sums of one pass with the trainer's metrics (`name:reduction`). A number beyond MAX_SUM counts as none:
        a client can cause it with logprobs that no model gives."""
        counted = round(metrics.get("active_tokens:sum", 0.0))

        def summed(name: str) -> tuple[float, int]:
            total = metrics.get(name)
            return (0.0, 0) if total is None or not abs(total) <= MAX_SUM else (total, counted)

        return cls(1, tokens, *_weighted(metrics), *summed("kl:sum"), *summed("clipped:sum"), *summed("ratio:sum"))

    def __add__(self, other: Self) -> StepSums:
        mine, theirs = asdict(self), asdict(other)
        return StepSums(**{name: mine[name] + theirs[name] for name in mine})


def _weighted(metrics: Mapping[str, float]) -> tuple[float, float]:
    """The loss of a pass and the sum of its weights; of a pass that has no weight, or only 0, neither. The losses of
    other passes are sums over advantages, of which no mean says anything."""
    loss, weights = metrics.get("loss:sum", 0.0), metrics.get("weights:sum", 0.0)
    return (loss, weights) if abs(loss) <= MAX_SUM and 0 < weights <= MAX_SUM else (0.0, 0.0)


_SUMS = tuple(field.name for field in fields(StepSums))
_ADD = text(
    f"INSERT INTO run_steps (model_id, step, updated_at, ended_at, busy_s, {', '.join(_SUMS)}) "
    f"SELECT id, steps + 1, :at, NULL, :busy_s, {', '.join(':' + name for name in _SUMS)} "
    "FROM models WHERE id = :model_id "
    "ON CONFLICT (model_id, step) DO UPDATE SET updated_at = excluded.updated_at, "
    + ", ".join(f"{name} = run_steps.{name} + excluded.{name}" for name in ("busy_s", *_SUMS))
)
"""Adds to the open step of a model, which it makes if there is none."""


def add_passes(connection: Connection, trained: Mapping[str, StepSums], busy_s: float) -> None:
    """Add passes, by model id, to the open steps. `busy_s` is the time of all of them together; a model's part of it is
    its part of the tokens."""
    tokens = sum(sums.tokens for sums in trained.values())
    now = time.time()
    rows = [
        {"model_id": model_id, "at": now, "busy_s": busy_s * sums.tokens / max(1, tokens)} | asdict(sums)
        for model_id, sums in sorted(trained.items())
    ]
    if rows:
        connection.execute(_ADD, rows)


def end_step(model_id: str, busy_s: float, learning_rate: float | None = None) -> Change:
    """A change that ends the open step of a model with an optimizer step, which took `busy_s`. `learning_rate` is None
    if the step had no gradient."""

    def change(connection: Connection) -> None:
        now = time.time()
        connection.execute(_ADD, {"model_id": model_id, "at": now, "busy_s": busy_s} | asdict(StepSums()))
        number = connection.execute(
            update(_models).where(_models.c.id == model_id).values(steps=_models.c.steps + 1).returning(_models.c.steps)
        ).scalar_one()
        ended = (steps.c.model_id == model_id) & (steps.c.step == number)
        connection.execute(update(steps).where(ended).values(ended_at=now, learning_rate=learning_rate))
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
    clipped. Each is None where no pass had such a number. `busy_s` is the trainer's time for the step."""

    step: int
    ended_at: float
    tokens: int
    loss: float | None
    gap: float | None
    clip_fraction: float | None
    ratio: float | None
    learning_rate: float | None
    busy_s: float

    @classmethod
    def of(cls, row: Any) -> Self:
        return cls(
            row.step,
            row.ended_at,
            row.tokens,
            _mean(row.loss_sum, row.loss_weight),
            _mean(row.gap_sum, row.gap_tokens),
            _mean(row.clipped_sum, row.clipped_tokens),
            _mean(row.ratio_sum, row.ratio_tokens),
            row.learning_rate,
            row.busy_s,
        )


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None


def history(connection: Connection, model_id: str, after: int = 0) -> list[Step]:
    """The steps of a model after the step `after` that have ended, in their order."""
    ended = (steps.c.model_id == model_id, steps.c.step > after, steps.c.ended_at.is_not(None))
    query = select(steps).where(*ended).order_by(steps.c.step)
    return [Step.of(row) for row in connection.execute(query)]


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
    """By model id, its whole history in at most CURVE_POINTS points. A model without a step has none."""
    found: dict[str, list[CurvePoint]] = {}
    for row in connection.execute(_CURVES, {"models": [*model_ids]}) if model_ids else ():
        loss, gap = _mean(row.loss_sum, row.loss_weight), _mean(row.gap_sum, int(row.gap_tokens))
        point = CurvePoint(row.step, loss, gap)
        found.setdefault(row.model_id, []).append(point)
    return found


MAX_CURVES = 500
"""The most curves that are kept: some 5 MB."""


class Curves:
    """Curves of runs, kept until a step ends: reading a full history takes milliseconds, and a page asks every two
    seconds. Beyond MAX_CURVES, the one that was asked for longest ago is forgotten. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[int, list[CurvePoint]]] = OrderedDict()

    def of(self, connection: Connection, steps_of: Mapping[str, int]) -> dict[str, list[CurvePoint]]:
        """By model id, the curve of each model in `steps_of`, which has the number of its steps."""
        with self._lock:
            found = {
                model: kept[1]
                for model, ended in steps_of.items()
                if (kept := self._kept.get(model)) and kept[0] == ended
            }
        missing = steps_of.keys() - found.keys()
        read = _curves(connection, sorted(missing))
        found |= {model: read.get(model, []) for model in missing}
        with self._lock:
            for model, ended in steps_of.items():
                self._kept[model] = (ended, found[model])
                self._kept.move_to_end(model)
            while len(self._kept) > MAX_CURVES:
                self._kept.popitem(last=False)
        return found

    def __len__(self) -> int:
        return len(self._kept)
