"""The training of one step. The tenants and the run without faults both use it."""

from __future__ import annotations

from typing import Any

import tinker
from tinker import types

from skyrl.cli.demo.rl import datum
from tests.chaos.journal import Step

BASE_MODEL = "tiny"
"""The name of the base model, also of another one's."""
RANK = 8
EPOCHS = 2
FINAL = "final"


def new_trainer(service: tinker.ServiceClient, seed: int) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=BASE_MODEL, rank=RANK, seed=seed).result()


def train(trainer: tinker.TrainingClient, step: Step, learning_rate: float) -> list[Any]:
    """Send EPOCHS updates on the step's data without waiting in between; returns the answers."""
    if not step.data:
        return []
    adam = types.AdamParams(learning_rate=learning_rate)
    data = [datum(*each) for each in step.data]
    pending = [(trainer.forward_backward(data, "ppo"), trainer.optim_step(adam)) for _ in range(EPOCHS)]
    answers: list[Any] = []
    for training_pass, optimizer_step in pending:
        output = training_pass.result()
        answers.append([output.metrics, [each["logprobs"].data for each in output.loss_fn_outputs]])
        answers.append(optimizer_step.result().metrics)
    return answers


def save_or_load(
    service: tinker.ServiceClient, trainer: tinker.TrainingClient, step: Step, saved: dict[str, str]
) -> tinker.TrainingClient:
    """Save and load as the step says; returns the training client to go on with. `saved` holds the paths of this run's
    states by name."""
    if step.saved is not None:
        saved[step.saved] = trainer.save_state(step.saved).result().path
    if step.loaded is None:
        return trainer
    return service.create_training_client_from_state_with_optimizer(saved[step.loaded]).result()
