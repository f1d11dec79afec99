"""What `skyrl capacity` finds: the measured numbers, what follows from them, and how far the estimates are off.

Knows bytes, seconds and tokens. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from skyrl.base.config.backend import MAX_LORAS
from skyrl.cli.capacity.memory import SERVER, TRAINER, VLLM
from skyrl.cli.launcher.memory_estimate import API_BYTES, LAUNCHER_BYTES, Need
from skyrl.cli.launcher.room import Cores, Limit, Room, limits, slots_that_fit

ALL, PASS, LARGEST_PASS = "all", "pass", "largest pass"
IN_TRAINING, IN_VLLM = "adapter in training", "adapter in vLLM"
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
    """The most bytes of the trainer in a pass of `rows` tokens. `full`: whether a micro-batch has no more."""

    rows: int
    bytes: float
    full: bool


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
    """All that was measured; bytes. `available`: before the start. `ready`: of each part when the server was ready.
    `adapter`: of each adapter in training. `sampled`: of each adapter in vLLM, its slot and what is kept. None: not
    measured. `cache_tokens`: of all vLLMs; None if vLLM does not say."""

    available: float
    ready: dict[str, float]
    passed: Passed | None
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
    allow. `slots`: None for a `max_loras` of "auto". `more_apis`: of the configuration, beside the measured one."""

    base_model: str
    rank: int
    slots: int | None
    kept: int
    most_slots: int
    engines: int
    cores: int
    threads: int
    gpus: tuple[str, ...]
    more_apis: int = 0


@dataclass(frozen=True)
class Answer:
    """`measured` and `predicted`: bytes, by the names of this module and of `memory`. `off`: by how much of what was
    measured each prediction is off. `auto`: the number for `max_loras`. Without `auto`, `tenants`, `room` and `limits`
    where too little is known of the memory."""

    setting: Setting
    load: Load
    found: Found
    measured: dict[str, float]
    predicted: dict[str, float]
    off: dict[str, float]
    room: Room | None = None
    auto: int | None = None
    slots: int = 0
    tenants: int | None = None
    limits: list[Limit] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def answer_of(setting: Setting, load: Load, found: Found, need: Need | None) -> Answer:
    """What follows. `need`: the estimate of before the start; None where there is none, as on GPUs."""
    measured, predicted = _measured(found), _predicted(need, found)
    off = {name: predicted[name] / value - 1 for name, value in measured.items() if name in predicted}
    known = Answer(setting, load, found, measured, predicted, off)
    room = _room(known, need)
    if room is None:
        return known
    auto = slots_that_fit(room, setting.kept, setting.most_slots)
    slots = auto if setting.slots is None else setting.slots
    kept = max(setting.kept, slots)
    sequences = None if found.cache_tokens is None else found.cache_tokens / (load.prompt + load.answer)
    bounds = limits(
        room,
        slots,
        kept,
        cores=_cores(setting, found.throughput),
        sequences=sequences,
        of_tenant=load.samples,
        threads=setting.threads,
    )
    return replace(known, room=room, auto=auto, slots=slots, tenants=room.tenants(slots, kept), limits=bounds)


def _room(known: Answer, need: Need | None) -> Room | None:
    """By what was measured, and where that lacks by the estimate. A pass counts for larger ones in the proportion of
    their estimates."""
    setting, measured, predicted, passed = known.setting, known.measured, known.predicted, known.found.passed
    either = predicted | measured
    adapter, largest = either.get(IN_TRAINING), predicted.get(LARGEST_PASS)
    if largest is not None and PASS in measured:
        largest *= measured[PASS] / predicted[PASS]
    elif passed is not None and passed.full:
        largest = passed.bytes
    if adapter is None or largest is None:
        return None
    sampling = kept = 0.0
    if need is not None:
        sampling = need.use.cache + need.use.computing(need.use.batch, need.use.sequences)
        kept = either[IN_VLLM] * need.use.adapter / (need.use.slot + need.use.adapter or 1.0)
    return Room(
        available=known.found.available,
        ready=measured[ALL] + (0 if setting.gpus else setting.more_apis * API_BYTES),
        passing=max(0.0, largest - measured[TRAINER] - adapter),
        sampling=sampling,
        adapter=adapter,
        slot=either.get(IN_VLLM, 0.0) - kept if need is not None else 0.0,
        kept=kept,
        engines=setting.engines,
        of_longest=need is not None and need.passing is not None and need.passing.longest > need.passing.rows,
    )


def _measured(found: Found) -> dict[str, float]:
    measured = {**found.ready, ALL: sum(found.ready.values())}
    if found.passed is not None:
        measured[PASS] = found.passed.bytes
    more = {IN_TRAINING: found.adapter, IN_VLLM: found.sampled}
    return measured | {name: value for name, value in more.items() if value is not None}


def _cores(setting: Setting, throughput: Sequence[Throughput]) -> Cores | None:
    """By what one tenant used who trained and sampled; None if that was not measured, and on GPUs, which do most."""
    mixed = [row for row in throughput if row.what == MIXED]
    return Cores(setting.cores, sum(mixed[0].cores.values())) if mixed and not setting.gpus else None


def _predicted(need: Need | None, found: Found) -> dict[str, float]:
    if need is None:
        return {}
    predicted = {TRAINER: need.trainer, VLLM: need.vllms, SERVER: LAUNCHER_BYTES + API_BYTES}
    predicted |= {ALL: sum(predicted.values()), IN_VLLM: need.use.slot + need.use.adapter}
    if (passing := need.passing) is not None:
        free = max(0.0, found.available - need.total)
        predicted[IN_TRAINING] = passing.in_training
        predicted[LARGEST_PASS] = need.trainer + passing.worst(free)[0]
        if found.passed is not None:
            predicted[PASS] = need.trainer + passing.peak(found.passed.rows, free)
    return predicted


def advice(answer: Answer) -> str:
    """What to set, in a sentence."""
    given, auto = answer.setting.slots, answer.auto
    if auto is None or answer.found.passed is None:
        return f"{MAX_LORAS}: too little was measured to say what fits: give more --minutes"
    if given is None:
        return f'{MAX_LORAS} = "auto" takes {auto} from now on'
    if given == auto:
        return f"{MAX_LORAS} = {auto} is what fits"
    why = "memory has room for more adapters at once" if auto > given else "memory does not hold as many"
    return f'{MAX_LORAS}: set {auto}, or "auto"; it is {given}, and {why}'


def far_off(answer: Answer) -> list[str]:
    """The predictions that are more than MOST_OFF away from what was measured."""
    return [name for name, part in answer.off.items() if abs(part) > MOST_OFF]
