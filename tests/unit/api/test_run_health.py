"""The health of a run on recorded and simulated series: a sentence when a number leaves the usual, and only then."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from skyrl.api.run_health.health import health_of
from skyrl.api.run_health.usual import FORGIVEN, LEAST_REFERENCE, RECENT, Bounds, Level, level_of
from skyrl.storage.db.run_steps import Step

Draw = Callable[[random.Random], float]
STEP = Step(
    step=0,
    ended_at=0.0,
    passes=1,
    tokens=100,
    loss=None,
    gap=0.001,
    clip_fraction=0.02,
    ratio=1.0,
    learning_rate=1e-4,
    busy_s=2.0,
    reward=0.5,
    active=0.8,
    samples=32,
    truncated=0.03,
    entropy=1.0,
    wall_s=10.0,
    sampling_s=5.0,
    wait_s=0.5,
    save_s=0.5,
    saves=1,
)


def run(*parts: tuple[int, Mapping[str, object]]) -> list[Step]:
    """So many steps with these numbers, one part after the other, numbered from 1."""
    steps = [replace(STEP, **numbers) for count, numbers in parts for _ in range(count)]  # pyright: ignore[reportArgumentType]
    return [replace(step, step=number) for number, step in enumerate(steps, 1)]


def noisy(rng: random.Random, steps: int, reward: float = 0.5) -> list[Step]:
    """A steady run: each number has noise of its kind around one mean. 32 samples a step, of which 5 % are cut off."""
    made: list[Step] = []
    for number in range(1, steps + 1):
        sampling_s = rng.lognormvariate(1.6, 0.3)
        made.append(
            replace(
                STEP,
                step=number,
                gap=rng.gauss(0.014, 0.002),
                ratio=1 + rng.gauss(0, 0.02),
                clip_fraction=rng.betavariate(2, 30),
                reward=min(1.0, max(0.0, reward + rng.gauss(0, 0.1))),
                active=rng.betavariate(16, 4),
                truncated=sum(rng.random() < 0.05 for _ in range(32)) / 32,
                entropy=rng.gauss(0.8, 0.08),
                sampling_s=sampling_s,
                wall_s=sampling_s + 3 + rng.expovariate(2),
            )
        )
    return made


def test_a_steady_run_has_a_sentence_in_fewer_than_one_of_200_steps() -> None:
    """The health is asked for at every tenth step of 14 runs."""
    rng = random.Random(0)
    asked = alarms = 0
    for _ in range(14):
        steps = noisy(rng, 200)
        for end in range(10, 201, 10):
            asked += 1
            alarms += bool(health_of(steps[:end]).sentences)
    assert alarms < asked / 200


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.gauss(1, 0.1),
        lambda rng: rng.lognormvariate(0, 1),
        lambda rng: rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1, 1)),
        lambda rng: sum(rng.random() < 0.3 for _ in range(8)) / 8,
    ],
    ids=["normal", "lognormal", "heavy tails (t with 2 degrees)", "a share of 8 samples"],
)
def test_noise_of_any_kind_leaves_the_usual_in_fewer_than_one_of_200_steps(draw: Draw) -> None:
    rng = random.Random(1)
    away = asked = 0
    for _ in range(20):
        points = [(number, draw(rng)) for number in range(1, 201)]
        for end in range(30, 201, 10):
            level = level_of(points[:end], Bounds("both", 1e-9))
            assert level is not None
            away += level.since is not None
            asked += 1
    assert away < asked / 200


def test_a_steady_run_that_loses_six_spreads_is_found_within_ten_steps_and_from_its_step_on() -> None:
    rng = random.Random(2)
    for _ in range(20):
        points = [(step, rng.gauss(0.0 if step < 60 else 0.6, 0.1)) for step in range(1, 70)]
        level = level_of(points, Bounds("high", 0.01))
        assert level is not None
        assert level.since is not None
        assert abs(level.since - 60) <= 3


def series(*parts: tuple[int, float]) -> list[tuple[int, float]]:
    values = [value for count, value in parts for _ in range(count)]
    return [*enumerate(values, 1)]


@pytest.mark.parametrize(
    ("points", "level"),
    [
        (series((RECENT - 1, 1.0)), None),
        (series((LEAST_REFERENCE + RECENT - 1, 1.0)), Level(1.0)),
        (series((LEAST_REFERENCE + RECENT, 1.0)), Level(1.0, 1.0, 0.0)),
        (series((30, 1.0), (2, 9.0)), Level(1.0, 1.0, 0.0)),
        (series((30, 1.0), (3, 9.0)), Level(9.0, 1.0, 0.0, since=31)),
        (series((30, 1.0), (50, 9.0)), Level(9.0, 1.0, 0.0, since=31)),
        (series((30, 1.0), (20, 9.0), (5, 1.0)), Level(1.0, 1.0, 0.0)),
        (series((30, 1.0), (FORGIVEN + 30, 9.0)), Level(9.0, 9.0, 0.0)),
        (series((30, 9.0), (5, 1.0)), Level(1.0, 9.0, 0.0)),
    ],
    ids=[
        "too few",
        "no usual yet",
        "usual",
        "two odd steps",
        "left",
        "still away",
        "back",
        "the new usual",
        "good side",
    ],
)
def test_a_level(points: Sequence[tuple[int, float]], level: Level | None) -> None:
    assert level_of(points, Bounds("high", 0.5)) == level


UNUSUAL: dict[str, tuple[Mapping[str, object], str]] = {
    "max_tokens too small": (
        {"truncated": 0.41},
        "truncated samples rose from 3 % to 41 % since step 31: max_tokens may be too small, or answers grow without "
        "an end",
    ),
    "temperature not told": (
        {"gap": -0.21},
        "the gap between sampler and trainer rose from 0.001 nats to 0.21 nats since step 31: samples of older "
        "weights, or sampled with temperature, top_p and top_k that loss_fn_config does not tell the trainer, or a "
        "learning rate that is too large",
    ),
    "old samples": (
        {"ratio": 1.3},
        "the ratio's distance from 1 rose from 0 to 0.3 since step 31: samples of older weights, or sampled with "
        "temperature, top_p and top_k that loss_fn_config does not tell the trainer, or too many passes over the same "
        "samples",
    ),
    "learning rate too large": (
        {"clip_fraction": 0.3},
        "the part of clipped tokens rose from 2 % to 30 % since step 31: the learning rate is too large, or there are "
        "too many passes over the same samples",
    ),
    "collapse": (
        {"entropy": 0.1},
        "entropy of samples fell from 1.00 nats to 0.10 nats since step 31: the policy collapses, or samples have "
        "another temperature; lower the learning rate",
    ),
    "randomness": (
        {"entropy": 3.0},
        "entropy of samples rose from 1.00 nats to 3.00 nats since step 31: samples get random, or have another "
        "temperature; lower the learning rate",
    ),
    "reward": (
        {"reward": 0.1},
        "reward fell from 0.5 to 0.1 since step 31: if gap or entropy changed before it, lower the learning rate or "
        "load an earlier checkpoint",
    ),
    "few advantages": (
        {"active": 0.2},
        "the part of tokens with an advantage fell from 80 % to 20 % since step 31: more and more groups have equal "
        "rewards: choose other prompts, or sample more for each",
    ),
    "waits for samples": (
        {"wall_s": 40.0, "sampling_s": 34.0},
        "step time rose from 10 s to 40 s since step 31: sampling took 5 s of it and takes 34 s now",
    ),
    "no gradient": (
        {"learning_rate": None},
        "nothing is learned: the last 5 steps had no gradient; the client may send no data, because all rewards of a "
        "group are equal",
    ),
    "old weights": (
        {"saves": 0},
        "samples come from weights of 10 steps ago (before: 0 at most): make a new sampling client with "
        "save_weights_and_get_sampling_client",
    ),
}


@pytest.mark.parametrize("trap", UNUSUAL)
def test_each_trap_has_its_sentence(trap: str) -> None:
    numbers, sentence = UNUSUAL[trap]
    health = health_of(run((30, {}), (10, numbers)))
    assert (health.state, health.sentences) == ("unusual", [sentence])
    assert health_of(run((40, {}))).state == "usual"


def test_equal_rewards_from_the_first_step_on_are_said() -> None:
    [sentence] = health_of(run((6, {"active": 0.0}))).sentences
    assert sentence.startswith("nothing is learned: no token of the last 5 steps had an advantage")


@pytest.mark.parametrize(
    ("numbers", "begin"),
    [
        ({"truncated": 0.9}, "90 % of the samples end at max_tokens: it may be too small"),
        ({"gap": 0.3}, "the gap between sampler and trainer is 0.30 nats (0.01 to 0.02 is healthy on GPUs)"),
    ],
)
def test_what_is_wrong_from_the_first_step_on_is_said_without_a_past(numbers: Mapping[str, object], begin: str) -> None:
    assert health_of(run((4, numbers))).sentences == []
    [sentence] = health_of(run((6, numbers))).sentences
    assert sentence.startswith(begin)


def test_a_rise_over_twenty_steps_is_found_and_one_over_all_steps_is_the_usual() -> None:
    rise = [(1, {"truncated": 0.03 + 0.02 * number}) for number in range(20)]
    [sentence] = health_of(run((30, {}), *rise)).sentences
    assert sentence.startswith("truncated samples rose from 3 % to 37 % since step 36")
    assert health_of(run(*((1, {"truncated": 0.004 * number}) for number in range(100)))).sentences == []


def test_a_number_that_no_step_has_is_not_known_and_says_why() -> None:
    none = {"loss": None, "reward": None, "gap": None, "ratio": None, "clip_fraction": None, "active": None}
    health = health_of(run((3, none | {"truncated": None, "entropy": None, "wall_s": None})))
    assert (health.state, health.sentences, health.time) == ("too early", [], None)
    assert {line.text for line in health.lines} == {"not known"}
    assert all(line.missing for line in health.lines)
    assert health_of([]).lines == health.lines


def test_the_time_of_a_step_is_divided_and_the_client_has_the_rest() -> None:
    health = health_of(run((6, {})))
    assert health.time == (
        "a step takes 10 s: sampling 50 %, waiting for the trainer 5 %, training 20 %, saving 5 %, the client 20 %"
    )
    beside = health_of(run((6, {"sampling_s": 9.0})))
    assert beside.time is not None
    assert beside.time.endswith("the client 0 %; some of it at the same time")


def test_weights_that_are_saved_as_rarely_as_ever_are_not_old() -> None:
    rare = [(1, {"saves": 1}), (15, {"saves": 0})]
    assert health_of(run(*rare * 4)).sentences == []


def test_steps_that_are_not_kept_any_more_may_have_saved() -> None:
    steps = run((30, {}), (40, {"saves": 0}))
    assert health_of(steps).sentences != []
    assert health_of([step for step in steps if step.step % 2]).sentences == []
