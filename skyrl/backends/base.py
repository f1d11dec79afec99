"""What a training backend is: the protocol between the engine and whatever runs forward, backward and the optimizer.

Knows arrays and directories. Deliberately knows nothing of the database, the wire, the life of requests, or vLLM.

Threads: all methods are synchronous. The engine calls them from one thread, except `save_state` and `save_adapter`:
these may come from other threads while passes and steps of other models run.

Ranks: a backend may compute on several ranks, in processes or on hosts of their own. The `Backend` object lives in the
engine's process and hides them. A method returns when all ranks have done their part.

Files: a directory that a method is given lies on the engine's host. A rank cannot be expected to see that directory.
The `Backend` object writes the files there, from tensors that ranks send it, and sends ranks what it reads there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from skyrl.types.lora import LoraSpec

AdapterDtype = Literal["float32", "bfloat16"]
"""What the tensors of a saved adapter are stored in."""


class InvalidRequest(ValueError):
    """The caller's mistake. The message names the field and says what is allowed; nothing has been changed."""


class OutOfMemory(MemoryError):
    """The device had no memory left for this command. The model is as before; others' commands may still run."""


class BackendLost(BaseException):
    """The backend cannot be used any more, whichever command comes next: the engine must end.

    Not an Exception, so that no handler takes it for the failure of one command. The next engine process recovers all
    models from their snapshots and the command log.
    """


class DeviceFault(BackendLost):
    """The device does not answer any more, for example after a CUDA error that stays."""


class RankDied(BackendLost):
    """A process that is one rank of the backend has ended, or does not answer any more."""


@dataclass(frozen=True)
class ModelLimits:
    """What the base model allows: token ids are in [0, vocab_size), sequences have at most max_context tokens."""

    vocab_size: int
    max_context: int


@dataclass(frozen=True)
class Datum:
    """One sequence. `tokens`: int64 [N]. `loss_inputs`: name -> int64 or float32, [N] or [N, K], dense."""

    tokens: npt.NDArray[np.int64]
    loss_inputs: dict[str, npt.NDArray[np.int64] | npt.NDArray[np.float32]]


@dataclass(frozen=True)
class TrainingPass:
    """One `forward` (backward=False) or `forward_backward` command of one model."""

    model_id: str
    data: Sequence[Datum]
    loss_fn: str
    loss_config: dict[str, float] = field(default_factory=dict)
    backward: bool = True


@dataclass(frozen=True)
class PassResult:
    """`logprobs[i]`: float32, same shape as datum i's target_tokens, at temperature 1. `metrics`: `name:reduction`."""

    logprobs: list[npt.NDArray[np.float32]]
    metrics: dict[str, float]


@dataclass(frozen=True)
class AdamParams:
    """One AdamW step as torch defines it (decoupled decay); `grad_clip_norm` 0 is off. Defaults are Tinker's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class Backend(Protocol):
    """A frozen base model with many LoRA adapters, each with its own gradients and optimizer.

    Any method may raise OutOfMemory, which leaves the model as it was, or BackendLost, which ends the engine.
    """

    @property
    def limits(self) -> ModelLimits: ...

    @property
    def merges_passes(self) -> bool:
        """Whether passes of several models in one `run` share the base model's work."""
        ...

    @property
    def repeats_exactly(self) -> bool:
        """Whether the same commands of a model give the same bits again, whichever commands of other models run
        beside them, and however passes are grouped. If not, they give the same up to rounding."""
        ...

    def create_model(self, model_id: str, spec: LoraSpec) -> None:
        """Add an adapter. Raises InvalidRequest for a rank or a train flag that cannot be honoured."""
        ...

    def delete_model(self, model_id: str) -> None:
        """Forget an adapter, its gradients and optimizer; unknown ids are ignored."""
        ...

    def check(self, training_pass: TrainingPass) -> None:
        """Raise InvalidRequest when the pass cannot be run: loss name, config keys, shapes, dtypes, token ids."""
        ...

    def run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        """Run passes of any models, together where possible; one outcome each, in order.

        Gradients add up (sums, never means) in the order of `passes` until the model's `optim_step`. A pass that
        fails leaves its model's gradients as they were and never touches its neighbours. Results and gradients of
        one pass depend on the other passes beside it by no more than rounding; where `repeats_exactly`, not at all.
        """
        ...

    def check_step(self, params: AdamParams) -> None:
        """Raise InvalidRequest for hyper-parameters that no step can be made with."""
        ...

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Clip, step, clear gradients; returns metrics. Without accumulated gradients it changes nothing.

        The step is whole or not at all. Raises InvalidRequest, OutOfMemory or any other exception: nothing has
        changed, the gradient included. Raises FloatingPointError for a gradient that is not finite: the gradient
        is cleared, and nothing else has changed.
        """
        ...

    def clear_gradient(self, model_id: str) -> None:
        """Drop the model's accumulated gradient, if it has one."""
        ...

    def save_state(self, model_id: str, directory: Path) -> None:
        """Write a checkpoint into the existing directory: adapter, gradient accumulator and optimizer (moments, step
        count). Users download these files: they are flat, safetensors and JSON, the adapter in PEFT format as in
        `save_adapter`. Never changes the model. If it raises, the directory may hold a part of the files: the caller
        discards it."""
        ...

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        """Replace the adapter's weights by those of a checkpoint. With `optimizer`, also the moments, the step count
        and the pending gradient; without, these are dropped.

        Raises InvalidRequest when the saved adapter has another rank or other target modules.
        """
        ...

    def save_adapter(self, model_id: str, directory: Path, *, dtype: AdapterDtype = "float32") -> None:
        """Write the adapter in PEFT format (adapter_model.safetensors, adapter_config.json) into the existing
        directory; with `dtype` bfloat16, rounded to the nearest."""
        ...

    def save_snapshot(self, model_id: str, directory: Path) -> None:
        """Write into the existing directory whatever `restore_model` needs to bring back the model as it is now, with
        gradient and optimizer. Never changes the model.

        The content is the backend's own, in files and folders of any form, for example one file per rank. The engine
        only moves the directory, hard-links its files into another one, and deletes it; nobody else reads it. So a
        file may name its neighbours only relative to the directory, and may never change. If this raises, the caller
        discards the directory.
        """
        ...

    def restore_model(self, model_id: str, spec: LoraSpec, directory: Path) -> None:
        """Create the model from a snapshot, also from one that an earlier version of this backend wrote.

        Raises InvalidRequest when the model exists or `spec` cannot be honoured, and OSError or ValueError when files
        are missing or damaged. If it raises, there is no such model.
        """
        ...

    def close(self) -> None: ...
