"""The protocol between the engine and a training backend, which runs forward, backward and the optimizer.

Knows arrays and directories. Knows nothing of the database, the wire, requests or vLLM.

Threads: all methods are synchronous. The engine calls them from one thread, except `save_state` and `save_adapter`:
these may come from other threads while passes and steps of other models run.

Ranks: a backend may compute on several ranks, each in its own process or on its own host. The `Backend` object lives in
the engine's process and hides the ranks. A method returns when all ranks have done their part.

Files: each directory argument is a directory on the engine's host, which a rank may not see. The `Backend` object
writes files there from tensors that the ranks send, and sends the ranks the tensors that it reads there. It may write
the same files for a snapshot as for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from skyrl.base.adapter_files import Target
from skyrl.base.pictures.picture import PlacedPicture
from skyrl.base.pictures.vision import VisionConfig
from skyrl.base.types.custom_loss import CustomLoss
from skyrl.base.types.weights import LoraSpec
from skyrl.base.wire.requests import AdamParams

AdapterDtype = Literal["float32", "bfloat16"]
"""The dtype of the tensors in a saved adapter."""


class InvalidRequest(ValueError):
    """The client's mistake. The message names the field and says what is allowed. Nothing has changed."""


class PlaceTaken(InvalidRequest):
    """The backend trains as many models as it can. It has a place when it is told to delete one."""


class OutOfMemory(MemoryError):
    """The device had too little memory for this command. The model has not changed, and other commands may still
    run."""


class BackendLost(BaseException):
    """The backend cannot run any more commands: the engine must end.

    Not an Exception, so that no handler mistakes it for the failure of one command. The next engine process restores
    all models from their snapshots and the command log.
    """


class DeviceFault(BackendLost):
    """The device does not answer any more, for example after a CUDA error that breaks its context."""


class RankDied(BackendLost):
    """The process of one rank has ended, or does not answer any more."""


@dataclass(frozen=True)
class Mixture:
    """The experts of a base model: `layers` of its layers have `experts` each, of which a token uses `per_token`."""

    layers: int
    experts: int
    per_token: int


@dataclass(frozen=True)
class ModelLimits:
    """Limits of the base model: token ids are in [0, vocab_size), sequences have at most max_context tokens. `mixture`:
    its experts; None for a dense model. `sight`: how it sees; None if the backend takes no pictures. `base_model`: its
    name, for messages; empty where the server has one. `ties_unembedding`: lm_head and the embeddings are one
    tensor."""

    vocab_size: int
    max_context: int
    mixture: Mixture | None = None
    sight: VisionConfig | None = None
    base_model: str = ""
    ties_unembedding: bool = False


@dataclass(frozen=True)
class Datum:
    """One sequence. `tokens`: int64 [N]. `loss_inputs`: name -> int64 or float32, [N] or [N, K], dense. Besides the
    inputs of the loss, a datum for a mixture of experts may have `routed_experts`, int64 [N, layers, k] or packed; and
    any datum the tokens that its targets were drawn from (`skyrl.trainer.rows.sampled_from`).
    `pictures`: in the order of their places, without overlap; `tokens` holds the model's `image_token_id` there."""

    tokens: npt.NDArray[np.int64]
    loss_inputs: dict[str, npt.NDArray[np.int64] | npt.NDArray[np.float32]]
    pictures: tuple[PlacedPicture, ...] = ()


@dataclass(frozen=True)
class TrainingPass:
    """One `forward` (backward=False) or `forward_backward` command of a model. `files`: by digest, the file of each
    picture in `data`. They were opened before, under bounds, by `skyrl.base.pictures`. `custom_loss`: of a pass whose
    `loss_fn` is `custom`."""

    model_id: str
    data: Sequence[Datum]
    loss_fn: str
    loss_config: dict[str, float] = field(default_factory=dict)
    backward: bool = True
    files: Mapping[str, bytes] = field(default_factory=dict)
    custom_loss: CustomLoss | None = None


@dataclass(frozen=True)
class PassResult:
    """`logprobs[i]`: float32, same shape as datum i's target_tokens, at temperature 1 over the whole vocabulary unless
    the pass says what the targets were sampled from. `metrics`: `name:reduction`. `values[i]`: float32 [N], of the
    states before each target; None for a model without a value head."""

    logprobs: list[npt.NDArray[np.float32]]
    metrics: dict[str, float]
    values: list[npt.NDArray[np.float32]] | None = None


class Backend(Protocol):
    """A frozen base model with many LoRA adapters, each with its own gradients and optimizer; or one whole model.

    Any method may raise OutOfMemory, which leaves the model as it was, or BackendLost, which ends the engine.
    """

    @property
    def limits(self) -> ModelLimits: ...

    @property
    def micro_batch_tokens(self) -> int:
        """How many tokens a micro-batch has at most, where common prefixes count once."""
        ...

    @property
    def merges_passes(self) -> bool:
        """Whether passes of several models in one `run` share the base model's work."""
        ...

    @property
    def repeats_exactly(self) -> bool:
        """Whether repeating a model's commands gives the same bits, whichever commands of other models run at the same
        time, and however passes are grouped. If not, results are the same up to rounding."""
        ...

    def create_model(self, model_id: str, spec: LoraSpec) -> None:
        """Add a model. Raises InvalidRequest for a rank or a train flag that cannot be honoured, and PlaceTaken."""
        ...

    def layers_of(self, spec: LoraSpec) -> Sequence[Target]:
        """The layers that an adapter of this spec trains. None for a whole model."""
        ...

    def create_probe(self, model_id: str, spec: LoraSpec, kinds: Collection[str] = (), size: float = 0.0) -> None:
        """Add a model that is only run forward, saved as an adapter and deleted: it has the base model's weights and,
        on layers of these kinds, a random update proportional to `size`. Raises as `create_model`.

        A probe of a whole model has no kinds, and may be created only before any other model: it uses the weights that
        the backend has loaded, and reads no file."""
        ...

    def delete_model(self, model_id: str) -> None:
        """Forget an adapter, its gradients and optimizer; unknown ids are ignored."""
        ...

    def check(self, training_pass: TrainingPass) -> None:
        """Raise InvalidRequest when the pass cannot be run: loss name, config keys, shapes, dtypes, token ids."""
        ...

    def run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        """Run passes of any models, together where possible. Returns one outcome per pass, in order.

        Gradients add up (sums, never means) in the order of `passes` until the model's `optim_step`. A pass that fails
        changes neither its model's gradients nor other passes. The other passes of a call change the results and
        gradients of a pass by rounding at most; where `repeats_exactly`, not at all.
        """
        ...

    def yield_to(self, others: Callable[[], None]) -> None:
        """From now on call `others` between the micro-batches of a `run`, on its thread. `others` may call `run` and
        `optim_step` for models that have no pass in the call. A backend that computes in other processes never
        calls it."""
        ...

    def check_step(self, params: AdamParams) -> None:
        """Raise InvalidRequest for invalid hyper-parameters."""
        ...

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Clip, step, clear the gradient; returns metrics. Without an accumulated gradient nothing changes.

        Raises FloatingPointError for a gradient that is not finite: the gradient is cleared, and nothing else has
        changed. After any other exception (InvalidRequest, OutOfMemory) nothing has changed, and the gradient is kept.
        """
        ...

    def clear_gradient(self, model_id: str) -> None:
        """Drop the model's accumulated gradient, if it has one."""
        ...

    def save_state(self, model_id: str, directory: Path) -> None:
        """Write a checkpoint into the existing directory: adapter, gradient accumulator and optimizer (moments, step
        count). Users download these files: safetensors and JSON without sub-directories, the adapter in PEFT format as
        in `save_adapter`. Never changes the model. After an error the directory may hold some of the files; the caller
        discards the directory."""
        ...

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        """Replace the adapter's weights by the weights of a checkpoint. With `optimizer`, also replace the moments, the
        step count and the pending gradient; without it, drop them. A checkpoint may be an adapter in PEFT format alone.

        Raises InvalidRequest when the saved adapter has other ranks or other target modules.
        """
        ...

    def save_adapter(self, model_id: str, directory: Path, *, dtype: AdapterDtype | None = None) -> None:
        """Write into the existing directory what samplers and other programs load: an adapter in PEFT format
        (adapter_model.safetensors, adapter_config.json), a whole model in Hugging Face's format. With `dtype` bfloat16,
        round to the nearest. None: float32 for an adapter, the dtype that vLLM computes in for a whole model."""
        ...

    def save_snapshot(self, model_id: str, directory: Path) -> None:
        """Write into the existing directory all that `restore_model` needs to restore the model with its gradient and
        optimizer. Never changes the model.

        The backend chooses the files and their format, for example one file per rank. The engine only moves the
        directory, hard-links its files into another directory, and deletes it. So a file may name other files only
        relative to the directory, and may never change. After an error the caller discards the directory.
        """
        ...

    def restore_model(self, model_id: str, spec: LoraSpec, directory: Path) -> None:
        """Create the model from a snapshot that this or an earlier version of the backend wrote.

        Raises InvalidRequest when the model exists or `spec` cannot be honoured, and OSError or ValueError when files
        are missing or damaged. After an error of the restore the model does not exist.
        """
        ...

    def close(self) -> None: ...
