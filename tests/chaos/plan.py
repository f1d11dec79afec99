"""The faults of a run and their order. The same seed makes the same plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

API, ENGINE, VLLM_SERVER, VLLM_CORE, LAUNCHER = "API", "engine", "vLLM's API server", "vLLM's engine core", "launcher"
DATABASE, NETWORK = "database", "network"

Kind = Literal["kill", "stall", "hang", "lock", "lose the answer", "lose the request", "delay"]
Range = tuple[float, float]

NONE: Range = (0.0, 0.0)
STALL_S: Range = (1.0, 20.0)
SHORT_STALL_S: Range = (1.0, 6.0)
"""Stalls of vLLM: shorter than the bound after which vLLM is replaced."""
LOCK_S: Range = (1.0, 8.0)
DELAY_S: Range = (1.0, 5.0)
PAUSE_S: Range = (2.0, 10.0)
"""From the end of one fault to the start of the next."""
PATHS = (
    "asample",
    "retrieve_future",
    "forward_backward",
    "optim_step",
    "save_weights_for_sampler",
    "create_sampling_session",
)
"""The routes that faults of the network harm."""

DECK: list[tuple[Kind, str, Range, int]] = [
    ("kill", API, NONE, 3),
    ("kill", ENGINE, NONE, 3),
    ("kill", VLLM_SERVER, NONE, 2),
    ("kill", VLLM_CORE, NONE, 2),
    ("kill", LAUNCHER, NONE, 1),
    ("stall", API, STALL_S, 1),
    ("stall", ENGINE, STALL_S, 1),
    ("stall", LAUNCHER, STALL_S, 1),
    ("stall", VLLM_SERVER, SHORT_STALL_S, 1),
    ("stall", VLLM_CORE, SHORT_STALL_S, 1),
    ("hang", VLLM_SERVER, NONE, 1),
    ("hang", VLLM_CORE, NONE, 1),
    ("lock", DATABASE, LOCK_S, 2),
    ("lose the answer", NETWORK, NONE, 3),
    ("lose the request", NETWORK, NONE, 2),
    ("delay", NETWORK, DELAY_S, 1),
]
"""Each fault with its number of repetitions in a round. The plan shuffles the faults of each round."""


@dataclass(frozen=True)
class Fault:
    """One fault: it lasts `seconds` and starts `pause_s` after the last one. A fault of the network harms the next
    request to `path`."""

    kind: Kind
    victim: str
    seconds: float
    pause_s: float
    path: str

    @property
    def name(self) -> str:
        return self.kind if self.victim == NETWORK else f"{self.kind} {self.victim}"


def plan(seed: int, slower: float = 1.0) -> Iterator[Fault]:
    """An endless sequence of faults, with pauses that are so many times as long."""
    chance = random.Random(seed)
    while True:
        deck = [card for card in DECK for _ in range(card[-1])]
        chance.shuffle(deck)
        for kind, victim, seconds, _ in deck:
            yield Fault(kind, victim, chance.uniform(*seconds), slower * chance.uniform(*PAUSE_S), chance.choice(PATHS))
