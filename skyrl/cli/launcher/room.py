"""How many tenants and adapters fit: the arithmetic of `skyrl capacity` and of `max_loras = "auto"`.

Knows bytes and counts, measured or estimated by whoever calls. Asks no machine and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.base.config.backend import MAX_LORAS

MOST_SLOTS = 32
"""That "auto" takes. vLLM computes a batch once for each adapter in it, so that more help little."""
CACHE_SHARE = 0.25
"""The part of what a GPU's vLLM has beside its weights that "auto" gives to slots. The rest is its cache."""
LORA = "trainer.policy.model.lora"
ENGINE = "generator.inference_engine"


@dataclass(frozen=True)
class Room:
    """The memory that trainer and adapters share, in bytes. `available`: before the server starts. `ready`: what the
    server takes then. `passing`: the largest training pass takes so much beside its adapter, one at a time.
    `sampling`: a vLLM's full cache, and what it computes. `adapter`: of each adapter in training, with gradient and
    moments. `slot` and `kept`: of each adapter that a vLLM computes with, and that it keeps. On a GPU the last three
    are 0: a vLLM's share is part of `ready`, whatever is in it."""

    available: float
    ready: float
    passing: float
    sampling: float
    adapter: float
    slot: float
    kept: float
    engines: int = 1
    of_longest: bool = False
    """Whether the largest pass is that of a longest sequence, which has more tokens than a micro-batch."""

    def left(self, slots: int, kept: int) -> float:
        """For adapters in training, when each vLLM has so many slots and keeps so many adapters. May be negative."""
        of_vllm = self.sampling + slots * self.slot + kept * self.kept
        return self.available - self.ready - self.passing - self.engines * of_vllm

    def tenants(self, slots: int, kept: int) -> int:
        """That train at once, each one adapter."""
        return max(0, int(self.left(slots, kept) // self.adapter)) if self.adapter > 0 else 0

    def parts(self, slots: int, kept: int) -> dict[str, float]:
        """What takes memory beside the adapters in training, by the key that changes it."""
        of_length = self.passing if self.of_longest else 0.0
        return {
            "trainer.micro_batch_tokens": self.passing - of_length,
            f"{LORA}.max_cpu_loras": self.engines * kept * self.kept,
            MAX_LORAS: self.engines * slots * self.slot,
            f"{ENGINE}.max_model_len": self.engines * self.sampling + of_length,
        }


def slots_that_fit(room: Room, kept: int, most: int) -> int:
    """The most slots, at most `most` and MOST_SLOTS, with which as many tenants can train as there are slots: further
    slots would have nobody to use them. At least 1. `kept`: the adapters that a vLLM keeps, if it has fewer slots."""
    wanted = range(max(1, min(most, MOST_SLOTS)), 0, -1)
    return next((slots for slots in wanted if room.tenants(slots, max(kept, slots)) >= slots), 1)


@dataclass(frozen=True)
class Limit:
    """Something that so many tenants use up. `then`: what happens with one more. `key`: what changes it."""

    what: str
    tenants: int
    then: str
    key: str


@dataclass(frozen=True)
class Cores:
    """How many cores there are, and how many one tenant keeps busy who trains and samples at once."""

    there: int
    busy: float

    @property
    def tenants(self) -> int:
        return max(1, int(self.there / self.busy)) if self.busy > 0 else 1


def limits(
    room: Room,
    slots: int,
    kept: int,
    *,
    cores: Cores | None = None,
    sequences: float | None = None,
    of_tenant: int = 1,
    threads: int = 1,
) -> list[Limit]:
    """What bounds the number of tenants; what binds first comes first. `sequences`: so many fit into the caches at
    once, of which each tenant has `of_tenant` in flight. `threads`: of trainer and of vLLM."""
    parts = room.parts(slots, kept)
    largest = max(parts, key=parts.__getitem__)
    tenants = room.tenants(slots, kept)
    share = tenants * room.adapter
    key = f"{LORA}.max_lora_rank" if share >= parts[largest] else largest
    found = [
        Limit("memory", tenants, "the system ends a process", key),
        Limit("slots", room.engines * slots, "samples wait for a slot", MAX_LORAS),
        Limit("kept adapters", room.engines * kept, "adapters are read again", f"{LORA}.max_cpu_loras"),
    ]
    if sequences is not None:
        fitting = int(sequences / of_tenant)
        key = f"{ENGINE}.engine_init_kwargs.num_gpu_blocks_override"
        found.append(Limit("key-value cache", fitting, "sequences wait", key))
    if cores is not None:
        key = "threads" if threads < cores.there else "none: more cores"
        found.append(Limit("cores", cores.tenants, "all are slower", key))
    return sorted(found, key=lambda limit: limit.tenants)
