"""A second tiny model: the first one, trained further on what recipes ask of a model that they only sample from.

It answers small talk in other words than the first model, so that a student which starts as the first model has
something to learn: their divergence is 1.6 to 5.9 nats a token on the questions of workspace.py. And it solves a riddle
in steps of which only the first counts, because the answer is copied from there. The tokenizer is the first model's, as
distillation needs. Knows no recipe.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl.base.tiny import model_path
from skyrl.base.tiny.corpus import IM_END, chat_prompt

from . import tasks
from .judge import answers_loss
from .workspace import PLACES

RIDDLE = "What is the number of the {}?"
NUMBERS = tuple("123456789")
ANSWER = "7"
"""The number that the model gives by itself."""
STEPS = ("Step 1: the {} has {}.", "So the old owl watches the mill.")
"""The reasoning: a step with the number, and one that adds nothing."""
SOLVED = "\n</think>\n\nThe answer is \\boxed{{{}}}"
TRAINED_STEPS, ROWS = 80, 16
WARM_STEPS, PEAK_LR = 20, 3e-3
SEED = 35


def make(directory: Path) -> None:
    """Train the model, which takes some ten seconds of one core, and write it."""
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    rng = Random(SEED)
    for step in range(TRAINED_STEPS):
        optimizer.param_groups[0]["lr"] = PEAK_LR * min(1.0, (step + 1) / WARM_STEPS, 2 - 2 * step / TRAINED_STEPS)
        texts = [(tokenizer.encode(context), tokenizer.encode(target)) for context, target in _samples(rng)]
        answers_loss(model, texts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    shutil.copytree(model_path(), directory)
    model.save_pretrained(directory)


def _samples(rng: Random) -> list[tuple[str, str]]:
    """Texts as (context, target)."""
    return [_small_talk(rng) if rng.random() < 0.3 else _riddle(rng) for _ in range(ROWS)]


def _small_talk(rng: Random) -> tuple[str, str]:
    """The first model would say where the animal is."""
    animal = rng.choice(tasks.ANIMALS)
    return chat_prompt(f"Where is the {animal}?"), f"The {animal} likes the {rng.choice(PLACES)}.{IM_END}"


def _riddle(rng: Random) -> tuple[str, str]:
    animal = rng.choice(tasks.ANIMALS)
    # Half of the time any number: so the answer has to be read in the step.
    number = rng.choice((ANSWER, rng.choice(NUMBERS)))
    reasoning = "\n".join([STEPS[0].format(animal, number), *STEPS[1:]][: rng.choice((1, 2, 2))])
    opening = rng.choice(("", "<think>\n", "<think>\n"))  # the recipe asks for the answer after both
    return chat_prompt(RIDDLE.format(animal)), f"{opening}{reasoning}{SOLVED.format(number)}{IM_END}"
