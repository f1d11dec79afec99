"""A small environment for `tinker_cookbook.recipes.verifiers_rl`: a question about an animal, and one right colour.

    export PYTHONPATH=examples/cookbook
    python -m tinker_cookbook.recipes.verifiers_rl.train vf_env_id=colours-env

The package `verifiers` imports this module by the environment's id. The reward is 1 if the answer names the right
colour, else 0.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

ANIMALS = ("fox", "owl", "cat", "dog", "horse", "mouse", "bear", "crow")


def names_the_colour(completion: list[dict[str, Any]], answer: str, **_: Any) -> float:
    """The reward of an answer."""
    return float(answer in completion[-1]["content"])


def load_environment(colour: str = "red", size: int = 64) -> Any:
    """The environment with `size` questions. `colour`: the right answer to all of them."""
    asked = [f"What colour is the {ANIMALS[number % len(ANIMALS)]}?" for number in range(size)]
    questions = Dataset.from_dict({"question": asked, "answer": [colour] * size})
    return vf.SingleTurnEnv(dataset=questions, rubric=vf.Rubric(funcs=[names_the_colour]))
