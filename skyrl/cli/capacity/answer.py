"""What `skyrl capacity` finds: the measured numbers, what follows from them, and how far the estimates are off.

Knows bytes, seconds and tokens. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skyrl.base.config.backend import MAX_LORAS
from skyrl.cli.capacity.client import Failed
from skyrl.cli.capacity.memory import SERVER, TRAINER, VLLM
from skyrl.cli.launcher.memory_estimate import API_BYTES, LAUNCHER_BYTES, Need
from skyrl.cli.launcher.room import Cores, Limit, Room, limits, slots_that_fit

LARGE_BYTES = 20e6
"""Smaller parts are lost between the pages of other things."""
ADAPTER_COPIES = 4
"""Weights, gradient and two moments of an adapter in training."""
MIXED = "training and sampling"
MOST_OFF = 0.15
"""A prediction that is further from what was measured is said."""


@dataclass(frozen=True)
class Load:
    """What a tenant does in the measurement: tokens of a prompt, sampled tokens of a sample, samples in flight; tokens
    of a training pass."""

    prompt: int
    answer: int
    samples: int
    trained: int


@dataclass(frozen=True)
class Passed:
    """The largest training pass: `rows` tokens, of which `measured_rows` were measured at once. `bytes`: what it takes
    beside a resting trainer; where fewer were measured, a line through two measurements is drawn on."""

    rows: int
    measured_rows: int
    bytes: float


@dataclass(frozen=True)
class Throughput:
    """Tokens per second while `what` ran, and the cores that each part of the server kept busy."""

    what: str
    sampled_per_s: float
    trained_per_s: float
    cores: dict[str, float]


@dataclass(frozen=True)
class Operation:
    """Seconds of a Tinker operation: the median and the most of `count`."""

    name: str
    count: int
    seconds: float
    most: float


@dataclass(frozen=True)
class Found:
    """All that was measured; bytes. `ready`: of each part when the server was ready. `adapter`: of each adapter in
    training. `sampled`: of each adapter in vLLM, its slot and what is kept. None: not measured. `cache_tokens`: of all
    vLLMs; None if vLLM does not say."""

    available: float
    ready: dict[str, float]
    passed: Passed
    adapter: float | None
    sampled: float | None
    cache_tokens: int | None
    throughput: list[Throughput]
    operations: list[Operation]
    start_s: float
    notes: list[str]


@dataclass(frozen=True)
class Setting:
    """The keys that decide. `engines`: of vLLM. `kept`: the adapters that each keeps. `most_slots`: that other keys
    allow. `slots`: None for a `max_loras` of "auto"."""

    base_model: str
    rank: int
    slots: int | None
    kept: int
    most_slots: int
    engines: int
    cores: int
    threads: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """`auto`: the number for `max_loras`. `off`: by how much of what was measured each prediction is off."""

    setting: Setting
    load: Load
    found: Found
    room: Room
    auto: int
    slots: int
    tenants: int
    limits: list[Limit]
    predicted: dict[str, float]
    off: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def answer_of(setting: Setting, load: Load, found: Found, need: Need | None) -> Answer:
    """What follows. `need`: the estimate of before the start; None where there is none, as on GPUs. Raises Failed if
    the memory of an adapter was neither measured nor estimated."""
    estimated = need.passing.adapter * ADAPTER_COPIES if need is not None and need.passing is not None else None
    adapter = found.adapter or estimated
    if adapter is None:
        raise Failed(
            "the memory of an adapter in training was not measured, nor does config.json tell it: give more --minutes"
        )
    sampling = slot = kept = 0.0
    if need is not None:
        sampling = need.use.cache + need.use.computing(need.use.batch, need.use.sequences)
        slot = kept = (found.sampled or 2 * need.use.slot) / 2
    ready = sum(found.ready.values())
    room = Room(found.available, ready, found.passed.bytes, sampling, adapter, slot, kept, setting.engines)
    auto = slots_that_fit(room, setting.kept, setting.most_slots)
    slots = auto if setting.slots is None else setting.slots
    sequences = None if found.cache_tokens is None else found.cache_tokens / (load.prompt + load.answer)
    bounds = limits(
        room,
        slots,
        max(setting.kept, slots),
        cores=_cores(setting, found.throughput),
        sequences=sequences,
        of_tenant=load.samples,
        threads=setting.threads,
    )
    predicted = _predicted(need, found)
    measured = {**found.ready, "ready": ready, "trainer in its largest pass": found.ready[TRAINER] + found.passed.bytes}
    measured |= {"adapter in training": found.adapter, "adapter in vLLM": found.sampled}
    off = {name: predicted[name] / value - 1 for name, value in measured.items() if value and name in predicted}
    tenants = room.tenants(slots, max(setting.kept, slots))
    return Answer(setting, load, found, room, auto, slots, tenants, bounds, predicted, off)


def _cores(setting: Setting, throughput: Sequence[Throughput]) -> Cores | None:
    """By what one tenant used who trained and sampled; None if that was not measured, and on GPUs, which do most."""
    mixed = [row for row in throughput if row.what == MIXED]
    return Cores(setting.cores, sum(mixed[0].cores.values())) if mixed and not setting.gpus else None


def _predicted(need: Need | None, found: Found) -> dict[str, float]:
    if need is None:
        return {}
    predicted = {TRAINER: need.trainer, VLLM: need.vllms, SERVER: LAUNCHER_BYTES + API_BYTES}
    predicted["ready"] = sum(predicted.values())
    predicted["adapter in vLLM"] = 2 * need.use.slot
    if need.passing is not None:
        free = max(0.0, found.available - need.total)
        predicted["adapter in training"] = ADAPTER_COPIES * need.passing.adapter
        predicted["trainer in its largest pass"] = need.trainer + need.passing.peak(found.passed.rows, free)
    return predicted


def advice(answer: Answer) -> str:
    """What to set, in a sentence."""
    given = answer.setting.slots
    if given is None:
        return f'{MAX_LORAS} = "auto" takes {answer.auto} from now on'
    if given == answer.auto:
        return f"{MAX_LORAS} = {answer.auto} is what fits"
    why = "memory has room for more adapters at once" if answer.auto > given else "memory does not hold as many"
    return f'{MAX_LORAS}: set {answer.auto}, or "auto"; it is {given}, and {why}'


def far_off(answer: Answer) -> list[str]:
    """The predictions that are more than MOST_OFF away from what was measured, where that decides something."""
    return [name for name, part in answer.off.items() if abs(part) > MOST_OFF and answer.predicted[name] > LARGE_BYTES]
