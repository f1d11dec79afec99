"""The health of a run: each number, whether it has left the usual, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from skyrl.api.run_health.measures import MEASURES, Measure, percent, seconds
from skyrl.api.run_health.usual import LEAST_REFERENCE, RECENT, Level, level_of
from skyrl.storage.db.run_steps import Step, UntilAStepEnds, newest_steps

WINDOW = 300
"""The steps that are looked at."""
LEAST_AGE = 8
"""Steps without a save for sampling, more than are usual for the run, before its samples are called old."""

State = Literal["usual", "unusual", "too early"]
"""unusual: there is a sentence. too early: there is none, and no number has enough steps to be compared."""


@dataclass(frozen=True, slots=True)
class Line:
    """A number: its `value` and `text` of the last steps, the `usual` of the steps before, the `sentence` if it has
    left that. `missing` says why there is no value."""

    name: str
    value: float | None
    text: str
    usual: str | None
    sentence: str | None
    missing: str | None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the time of a step, in seconds, on average over the last steps."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Health:
    """`time` is a sentence on where the time of a step goes; its parts are `parts`."""

    state: State
    sentences: list[str]
    lines: list[Line]
    time: str | None
    parts: list[Part]

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def in_short(self) -> dict[str, Any]:
        """Without the single numbers, as JSON."""
        return {"state": self.state, "sentences": self.sentences, "time": self.time}


def health_of(steps: Sequence[Step]) -> Health:
    """`steps`: the newest of a run that have ended, in their order."""
    levels = [(measure, _level(measure, steps)) for measure in MEASURES]
    parts = _parts(steps[-RECENT:])
    lines = [_line(measure, level, steps) for measure, level in levels]
    sentences = [line.sentence for line in lines if line.sentence is not None]
    sentences += [each for each in (_no_signal(steps), _old_weights(steps)) if each is not None]
    compared = any(level is not None and level.usual is not None for _, level in levels)
    state: State = "unusual" if sentences else "usual" if compared else "too early"
    return Health(state, sentences, lines, _time(steps[-RECENT:], parts), parts)


def _level(measure: Measure, steps: Sequence[Step]) -> Level | None:
    points = [(step.step, value) for step in steps if (value := measure.value(step)) is not None]
    return level_of(points, measure.bounds)


def _line(measure: Measure, level: Level | None, steps: Sequence[Step]) -> Line:
    last = next((value for step in reversed(steps) if (value := measure.value(step)) is not None), None)
    if last is None:
        return Line(measure.name, None, "not known", None, None, measure.missing)
    now = last if level is None else level.now
    usual = None if level is None or level.usual is None else measure.text(level.usual)
    sentence = None if level is None else measure.sentence(level)
    if sentence is not None and measure.name == "step time" and level is not None and level.since is not None:
        sentence += _grown(steps, level.since)
    return Line(measure.name, now, measure.text(now), usual, sentence, None)


def _grown(steps: Sequence[Step], since: int) -> str:
    """The part of the step time that grew most, as the end of a sentence."""
    before = [step for step in steps if step.step < since and step.wall_s is not None]
    was = {part.name: part.seconds for part in _parts(before[-RECENT * 4 :])}
    now = _parts(steps[-RECENT:])
    most = max(now, key=lambda part: part.seconds - was.get(part.name, 0.0))
    return f"{most.name} took {seconds(was.get(most.name, 0.0))} of it and takes {seconds(most.seconds)} now"


def _parts(steps: Sequence[Step]) -> list[Part]:
    """Empty if the time of no step is known."""
    timed = [step for step in steps if step.wall_s is not None]
    if not timed:
        return []
    sampling, waiting, training, saving = (
        fmean(getattr(step, name) for step in timed) for name in ("sampling_s", "wait_s", "busy_s", "save_s")
    )
    client = max(0.0, fmean(step.wall_s or 0.0 for step in timed) - sampling - waiting - training - saving)
    return [
        Part("sampling", sampling),
        Part("waiting for the trainer", waiting),
        Part("training", training),
        Part("saving", saving),
        Part("the client", client),
    ]


def _time(steps: Sequence[Step], parts: Sequence[Part]) -> str | None:
    if not parts:
        return None
    wall_s = fmean(step.wall_s for step in steps if step.wall_s is not None)
    said = ", ".join(f"{part.name} {percent(part.seconds / wall_s) if wall_s else '–'}" for part in parts)
    overlap = "; some of it at the same time" if sum(part.seconds for part in parts) > 1.01 * wall_s else ""
    return f"a step takes {seconds(wall_s)}: {said}{overlap}"


def _no_signal(steps: Sequence[Step]) -> str | None:
    """The last steps could not learn anything."""
    last = steps[-RECENT:]
    if len(last) < RECENT:
        return None
    if all(step.active == 0 for step in last):
        return (
            f"nothing is learned: no token of the last {RECENT} steps had an advantage; all rewards of a group may be "
            "equal: choose other prompts, or sample more for each"
        )
    if all(step.learning_rate is None for step in last):
        return (
            f"nothing is learned: the last {RECENT} steps had no gradient; the client may send no data, because all "
            "rewards of a group are equal"
        )
    return None


def _old_weights(steps: Sequence[Step]) -> str | None:
    """Samples still come, and since the last save of weights to sample from the run took more steps than it used to."""
    ages: list[int] = []
    age: int | None = None
    before = 0
    for step in steps:
        if step.saves:
            age = 0
        elif age is not None:  # a step that is not kept any more may have saved
            age = age + 1 if step.step == before + 1 else None
        before = step.step
        ages.append(age or 0)
    if not ages or not any(step.samples for step in steps[-RECENT:]):
        return None
    most = max(ages[: len(ages) - ages[-1] - 1], default=0)
    if age is None or len(ages) < LEAST_REFERENCE or age < LEAST_AGE + 2 * most:
        return None
    return (
        f"samples come from weights of {age} steps ago (before: {most} at most): make a new sampling client with "
        "save_weights_and_get_sampling_client"
    )


class Healths(UntilAStepEnds[Health]):
    """Healths of runs, kept until a step ends."""

    def __init__(self) -> None:
        super().__init__(lambda c, ids: {each: health_of(newest_steps(c, each, WINDOW)) for each in ids})
