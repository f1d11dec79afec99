"""A tiny judge: the tiny model, trained until it grades an answer by the colour that the answer names.

The tiny model itself never writes a grade. Knows neither the recipe nor its judge's prompt but as text.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl.base.tiny import model_path
from skyrl.base.tiny.corpus import IM_END

Pair = tuple[str, str]
"""A prompt as the model's chat template renders it, and the answer."""
PAIRS, LR = 16, 2e-3
"""Pairs in a step, and Adam's learning rate."""
LEARNED = 0.003
"""Mean loss of the answers' tokens, in nats, at which the judge has learned what to look at: some 70 steps. Before, the
loss stays near 0.35, where the judge knows the grades and not which one."""
STEPS = 400
"""At most."""
SEED = 1
IGNORE = -100


def make_judge(pairs: list[Pair], directory: Path) -> None:
    """Write a model to `directory` that gives these prompts these answers. Raises AssertionError if it cannot."""
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    taught = [(tokenizer.encode(prompt), tokenizer.encode(f"{answer}{IM_END}")) for prompt, answer in pairs]
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    rng = Random(SEED)
    last, steps = math.inf, 0
    while last > LEARNED:
        assert steps < STEPS, f"the judge did not learn to grade in {STEPS} steps: loss {last:.3f}"
        loss = answers_loss(model, rng.sample(taught, PAIRS))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        last, steps = loss.item(), steps + 1
    shutil.copytree(model_path(), directory)
    model.save_pretrained(directory)


def answers_loss(model: torch.nn.Module, pairs: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean loss of the answers' tokens, in nats. Shorter pairs are padded on the right."""
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.zeros(len(pairs), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return model(input_ids=ids, labels=labels, use_cache=False).loss
