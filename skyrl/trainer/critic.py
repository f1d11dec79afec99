"""A critic beside the policy: its inputs, advantages by generalised advantage estimation (GAE), and the value loss.

A value head gives each position's state the value V: what the policy may still get from there on. A pass sends the
`values` from before its updates, a `mask` of the positions whose tokens the policy has chosen, and either `returns` and
`advantages`, or `rewards`, of which `with_advantages` makes both. Knows arrays. Knows nothing of policy losses, of
models or of how a value is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.protocol import Datum, InvalidRequest, TrainingPass

VALUES, RETURNS, REWARDS, MASK = "values", "returns", "rewards", "mask"
LOSS_CONFIG: Mapping[str, float] = {"value_coef": 0.5, "value_clip": 0.2}
GAE_CONFIG: Mapping[str, float] = {"gamma": 1.0, "gae_lambda": 0.95}

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float32]


def is_sent(data: Sequence[Datum], *names: str) -> bool:
    """Whether any of the sequences has one of these inputs; without names, one that only a critic has."""
    return any(name in datum.loss_inputs for datum in data for name in names or (VALUES, RETURNS, REWARDS))


def check_inputs(datum: Datum) -> None:
    """Raise InvalidRequest for a mask of other numbers than 0 and 1, or a reward that no position would get. The inputs
    have the right shapes."""
    mask = datum.loss_inputs[MASK]
    if not np.isin(mask, (0, 1)).all():
        raise InvalidRequest(f"loss_fn_inputs.{MASK}: must be 0 or 1 at each position")
    lost = (mask == 0) & (datum.loss_inputs.get(REWARDS, mask) != 0)
    if lost.any():
        raise InvalidRequest(
            f"loss_fn_inputs.{REWARDS}: must be 0 where {MASK} is 0, and is not at position {int(lost.argmax())}"
        )


def check_config(config: Mapping[str, float]) -> None:
    """Raise InvalidRequest. config: completed, all numbers are finite and at least 0."""
    for name in GAE_CONFIG.keys() & config.keys():
        if config[name] > 1:
            raise InvalidRequest(f"loss_fn_config.{name}: must be from 0 to 1, got {config[name]:g}")
    if config["value_clip"] == 0:
        raise InvalidRequest("loss_fn_config.value_clip: must be above 0; a large number clips nothing")


def estimate(
    rewards: Numbers, values: Numbers, mask: Numbers, gamma: float, gae_lambda: float
) -> tuple[Floats, Floats]:
    """Advantages and returns, float32 [N] each, from inputs [N] of one sequence (equations 11 to 16 of
    "High-Dimensional Continuous Control Using Generalized Advantage Estimation", arXiv 1506.02438).

    The T positions whose mask is not 0 follow each other in time, whatever lies between them: delta_t = r_t + gamma
    V_(t+1) - V_t, A_t = delta_t + gamma lambda A_(t+1), R_t = A_t + V_t. After the last one the sequence has ended:
    V_T = A_T = 0. Elsewhere both are 0. Computed in float64.
    """
    places = np.flatnonzero(mask)
    own = values[places].astype(np.float64)
    deltas = rewards[places].astype(np.float64) + gamma * np.append(own[1:], 0.0)[: len(own)] - own
    found: list[float] = []
    later = 0.0
    for delta in reversed(deltas.tolist()):
        later = delta + gamma * gae_lambda * later
        found.append(later)
    advantages = np.array(found[::-1], np.float64)
    spread = np.zeros((2, len(mask)), np.float32)
    spread[0, places], spread[1, places] = advantages, advantages + own
    return spread[0], spread[1]


def with_advantages(training_pass: TrainingPass) -> TrainingPass:
    """The checked pass with advantages and returns in place of rewards; itself if it has none. A custom loss may have
    inputs of these names, which are its own."""
    if training_pass.custom_loss is not None or not is_sent(training_pass.data, REWARDS):
        return training_pass
    config = {**GAE_CONFIG, **training_pass.loss_config}
    data: list[Datum] = []
    for datum in training_pass.data:
        inputs = dict(datum.loss_inputs)
        rewards = inputs.pop(REWARDS)
        advantages, returns = estimate(rewards, inputs[VALUES], inputs[MASK], config["gamma"], config["gae_lambda"])
        data.append(replace(datum, loss_inputs=inputs | {"advantages": advantages, RETURNS: returns}))
    rest = {name: value for name, value in training_pass.loss_config.items() if name not in GAE_CONFIG}
    return replace(training_pass, data=data, loss_config=rest)


def value_loss(now: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """1/2 max((V - R)^2, (clamp(V, V_old - e, V_old + e) - R)^2) with e = `value_clip`, and 0 where the mask is 0; and
    a mask of the entries at which the second one is larger, where the loss has no gradient. All [M]. It is the loss of
    OpenAI's baselines (ppo2), beside the one of "Proximal Policy Optimization Algorithms" (arXiv 1707.06347)."""
    counts = inputs[MASK] != 0
    old, target = inputs[VALUES], inputs[RETURNS]
    bounded = torch.clamp(now.detach(), old - config["value_clip"], old + config["value_clip"])
    free, held = (now - target).square(), (bounded - target).square()
    clipped = counts & (held > free.detach())
    return torch.where(counts, 0.5 * torch.where(clipped, held, free), 0), clipped
