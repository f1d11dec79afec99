"""A user who learns one sentence by heart in rounds and samples it. Two such users can work at the same time.

Run in an isolated environment like run.py, as `python -m tests.e2e.sdk.learner`. The program reports when it is ready
and waits for the file `--begin`, so that several programs begin together.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

from tinker import types

from .user import MODEL, User, datum, wait

STEPS = 4
PROMPT_TOKENS = 2
POLL_S = 0.02


def continuation(sampler: Any, tokens: list[int]) -> list[int]:
    """A sampler's continuation of the beginning of `tokens`, to the same length."""
    prompt = types.ModelInput.from_ints(tokens[:PROMPT_TOKENS])
    params = types.SamplingParams(max_tokens=len(tokens) - PROMPT_TOKENS, temperature=0.0, stop=[])
    return list(wait(sampler.sample(prompt, 1, params)).sequences[0].tokens)


def prepare(user: User, text: str, load: str | None) -> tuple[Any, list[int]]:
    """A training client, new or loaded from a saved state, and the tokens of the sentence."""
    if load is None:
        trainer = user.train(rank=8)
    else:
        trainer = wait(user.service.create_training_client_from_state_with_optimizer(load))
    return trainer, list(trainer.get_tokenizer().encode(text))


def learn(user: User, trainer: Any, tokens: list[int], rounds: int, *, loaded: bool) -> dict[str, Any]:
    """Run rounds of STEPS steps and one sample each; returns the times of the rounds, the first and the last sample,
    and the saved path. With `loaded` the first round has no steps."""
    losses, spans, samples = [], [], []
    for number in range(rounds):
        began = time.time()
        for _ in range(STEPS if number or not loaded else 0):
            passed = trainer.forward_backward([datum(tokens)], "cross_entropy")
            stepped = trainer.optim_step(types.AdamParams(learning_rate=5e-3))
            losses.append(wait(passed).metrics["loss:sum"])
            wait(stepped)
        samples.append(continuation(wait(trainer.save_weights_and_get_sampling_client()), tokens))
        spans.append((began, time.time()))
    saved = wait(trainer.save_state("learnt")).path
    wait(user.rest.publish_checkpoint_from_tinker_path(saved))
    runs = [run.training_run_id for run in wait(user.rest.list_training_runs()).training_runs]
    return {
        "run": user.model_id(trainer),
        "runs": runs,
        "losses": losses,
        "spans": spans,
        "samples": samples,
        "expected": tokens[PROMPT_TOKENS:],
        "base": continuation(wait(user.service.create_sampling_client(base_model=MODEL)), tokens),
        "saved": saved,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("url", "key", "text"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--load", help="a published state to go on from")
    parser.add_argument("--begin", type=Path, required=True, help="wait for this file")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    user = User(given.url, given.key, Path.cwd())
    trainer, tokens = prepare(user, given.text, given.load)
    given.out.with_suffix(".ready").touch()
    while not given.begin.exists():
        time.sleep(POLL_S)
    given.out.write_text(json.dumps(learn(user, trainer, tokens, given.rounds, loaded=given.load is not None)))
    os._exit(0)


if __name__ == "__main__":
    main()
