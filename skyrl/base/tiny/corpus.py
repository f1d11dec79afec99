"""Synthetic text for the tiny model: plain sentences, small chats, and two tasks with a reward.

Everything is drawn from a `random.Random` that the caller seeds, so the same seed gives the same text. Each task also
has a teacher that makes mistakes (`Task.sloppy`), so that a model trained on its answers can still improve. Knows
nothing of tokenizers, models or training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Any

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"


def chat_prompt(user_text: str) -> str:
    """One user turn, then the start of the assistant's turn, as the model's chat template renders them."""
    return f"{IM_START}user\n{user_text}{IM_END}\n{IM_START}assistant\n"


def positional_reward(answer: Sequence[str], solution: Sequence[str]) -> float:
    """The share of places at which both hold the same item, out of the length of the longer one."""
    correct = sum(a == b for a, b in zip(answer, solution, strict=False))
    return correct / max(len(answer), len(solution), 1)


class Task(ABC):
    """A question with an answer that can be graded place by place."""

    name: str

    @abstractmethod
    def prompt(self, rng: Random) -> tuple[str, Any]:
        """A random question, and the state from which its answer is computed and graded."""

    @abstractmethod
    def answer(self, state: Any) -> str:
        """The right answer."""

    @abstractmethod
    def sloppy(self, rng: Random, state: Any) -> str:
        """An answer with random mistakes. Each mistake makes the later places wrong, too."""

    @abstractmethod
    def split(self, text: str) -> list[str]:
        """The items of an answer, in order."""

    def reward(self, state: Any, text: str) -> float:
        """The grade in [0, 1]; 1 only for the right answer at exactly the right length."""
        body = text.strip().removesuffix(IM_END).strip()
        return positional_reward(self.split(body), self.split(self.answer(state)))


class CountTask(Task):
    """`count from 3 by 2` -> `3 5 7 9 11 13 15 17`."""

    name = "count"
    terms = 8
    slip = 0.3

    def prompt(self, rng: Random) -> tuple[str, tuple[int, int]]:
        start, step = rng.randint(1, 20), rng.randint(2, 5)
        return f"count from {start} by {step}", (start, step)

    def answer(self, state: tuple[int, int]) -> str:
        start, step = state
        return " ".join(str(start + i * step) for i in range(self.terms))

    def sloppy(self, rng: Random, state: tuple[int, int]) -> str:
        value, step = state
        values = [value]
        for _ in range(self.terms - 1):
            value += step if rng.random() >= self.slip else 0
            values.append(value)
        return " ".join(map(str, values))

    def split(self, text: str) -> list[str]:
        return text.split(" ")


class SortTask(Task):
    """`sort: k,c,x,a` -> `a,c,k,x`."""

    name = "sort"
    letters = 9
    slip = 0.22

    def prompt(self, rng: Random) -> tuple[str, str]:
        state = "".join(rng.sample("abcdefghijklmnopqrstuvwxyz", self.letters))
        return f"sort: {','.join(state)}", state

    def answer(self, state: str) -> str:
        return ",".join(sorted(state))

    def sloppy(self, rng: Random, state: str) -> str:
        return ",".join(c for c in sorted(state) if rng.random() >= self.slip)

    def split(self, text: str) -> list[str]:
        return text.split(",")


TASKS: dict[str, Task] = {task.name: task for task in (CountTask(), SortTask())}

_ADJECTIVES = ["old", "young", "quiet", "clever", "small", "tired", "happy", "brave", "lazy", "gentle"]
_ANIMALS = ["fox", "owl", "cat", "dog", "horse", "mouse", "bear", "crow", "goat", "duck"]
_VERBS = [
    "watches",
    "follows",
    "finds",
    "hears",
    "visits",
    "remembers",
    "passes",
    "likes",
    "greets",
    "leaves",
]
_PLACES = ["river", "forest", "garden", "bridge", "mill", "market", "tower", "meadow", "harbour", "village"]
_TIMES = [
    "at dawn",
    "at night",
    "in spring",
    "in winter",
    "every day",
    "after the rain",
    "before noon",
    "alone",
]
_COLOURS = ["red", "green", "blue", "grey", "white", "black", "brown", "yellow"]


def sentence(rng: Random) -> str:
    """One plain English sentence from a small grammar."""
    adjective, animal, other = rng.choice(_ADJECTIVES), rng.choice(_ANIMALS), rng.choice(_ANIMALS)
    verb, place, time = rng.choice(_VERBS), rng.choice(_PLACES), rng.choice(_TIMES)
    kind = rng.randrange(4)
    if kind == 0:
        return f"The {adjective} {animal} {verb} the {place} {time}."
    if kind == 1:
        return f"A {animal} {verb} the {adjective} {other} near the {place}."
    if kind == 2:
        return f"In the {place} there is a {rng.choice(_COLOURS)} {animal} that {verb} the {other}."
    return f"When the {animal} {verb} the {place}, the {other} is {adjective}."


def paragraph(rng: Random, sentences: int) -> str:
    """Several sentences, separated by spaces."""
    return " ".join(sentence(rng) for _ in range(sentences))


def small_talk(rng: Random) -> tuple[str, str]:
    """A question about an animal or a place, and a reply that names it."""
    animal, place, colour = rng.choice(_ANIMALS), rng.choice(_PLACES), rng.choice(_COLOURS)
    kind = rng.randrange(3)
    if kind == 0:
        return f"Where is the {animal}?", f"The {animal} is near the {place}."
    if kind == 1:
        return f"What colour is the {animal}?", f"The {animal} is {colour}."
    return f"Tell me about the {place}.", f"The {place} is {rng.choice(_ADJECTIVES)}. {sentence(rng)}"
