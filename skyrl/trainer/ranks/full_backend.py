"""The backends for full fine-tuning: one model at a time, all of whose parameters are trained, on this process's device
or over ranks.

How a pass is cut, what is recorded of it, and how it fails are those of adapters; an item's gradient is added to that
of its pass tensor by tensor. Over ranks the backend lives in the engine's process, without a model. Its files are
written from what the ranks send, and sent to them, who see none of them. Tensors come and go in pages, so that neither
the engine nor a rank holds a copy of the model for a save. Knows nothing of the command log, the wire or the sampler.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from skyrl.base.config.server import ServerConfig, takes_pictures
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer import checks
from skyrl.trainer.device import command_on, failure_of, prepare_device
from skyrl.trainer.files.model_files import ModelFiles, Read
from skyrl.trainer.files.tensor_files import StoredTensors, TensorFiles
from skyrl.trainer.full import full_model
from skyrl.trainer.full.full_model import SHARD_BYTES, FullModel, describe_state, optimizer_files, read_description
from skyrl.trainer.full.parameters import FullParameters, adamw_step
from skyrl.trainer.losses import served_losses
from skyrl.trainer.model.row_budget import BudgetSettings, measure_row
from skyrl.trainer.passes.micro_batch import ItemResult, MicroBatch, look_at, record_or_fail
from skyrl.trainer.passes.micro_batch_losses import GroupSums, Scores
from skyrl.trainer.passes.pass_run import MicroBatchItem, SinglePassRun, items_of
from skyrl.trainer.protocol import (
    AdamParams,
    AdapterDtype,
    InvalidRequest,
    ModelLimits,
    OutOfMemory,
    PassResult,
    PlaceTaken,
    RankDied,
    StateSnapshots,
    TrainingPass,
)
from skyrl.trainer.ranks.full_rank import FullFacts, StateFacts
from skyrl.trainer.ranks.over_ranks import BackendOverRanks, RankGroup, outcome_of, results_of
from skyrl.trainer.ranks.plan import make_plan
from skyrl.trainer.rows.routed_experts import with_sorted_experts
from skyrl.trainer.shares import ShardLayout


def run_item(model: FullModel, parameters: FullParameters, piece: MicroBatchItem, *, backward: bool) -> None:
    """Run a slice. An error becomes the outcome of its pass (OutOfMemory if memory was short), and drops the pass's
    gradient. DeviceFault is raised."""
    if piece.running.error is not None:
        return
    device, failure, result = model.base.device, None, None
    try:
        result = _forward_backward(model, parameters, piece, backward)
    except Exception as error:  # it is this pass's outcome
        failure = failure_of(error, device)
    if failure is not None:
        keeps = backward and piece.trained
        if keeps and isinstance(failure, OutOfMemory) and (recomputation := model.base.packed.recomputation):
            recomputation.ran_out(piece.rows)  # no second attempt: a part of the gradient may have been added
        piece.running.fail(failure)
    elif result is not None:
        record_or_fail(piece, result, device)


def _forward_backward(
    model: FullModel, parameters: FullParameters, piece: MicroBatchItem, backward: bool
) -> ItemResult:
    """With `backward` the slice's gradient is added to `piece.running.gradient`, tensor by tensor: the gradient of a
    slice never exists as a whole."""
    running = piece.running
    if backward and running.gradient is None:
        running.gradient = parameters.zeros()
    backward = backward and piece.trained
    made = MicroBatch.without_adapters([piece], [look_at(model.base.tower, piece)], model.base.device)
    (group,) = made.losses.groups
    with torch.set_grad_enabled(backward):
        (logprobs,) = model.base.packed(made.packed, made.targets, made.segments)
        value = group.value(logprobs)
        total = value.total
        sums = GroupSums.of(group, value, total)
        if backward and running.gradient is not None:
            with model.gradients.into(parameters.views(running.gradient)):
                total.backward()
    return ItemResult(Scores(logprobs, [sums], None).read(), None)


class TorchFullBackend(StateSnapshots):
    """Full fine-tuning on one device: float32 on a CPU; on CUDA bfloat16, with float32 weights, gradients and moments.

    Slices run one at a time, so on a CPU results are the same to the last bit however passes are grouped.

    Raises ConfigError when the base model cannot be trained.
    """

    merges_passes = False

    def __init__(self, config: ServerConfig) -> None:
        trainer = config.backend_config.trainer
        self._device = prepare_device(config.threads)
        self._model = FullModel(
            config.base_model_path,
            self._device,
            gradient_checkpointing=trainer.gradient_checkpointing,
            pictures=takes_pictures(config),
        )
        budget = BudgetSettings.of(config)
        if budget.measures_on(self._device):
            measure_row(self._model.base, ())
        self._budget = budget.chosen([budget.of_model(self._model.base.packed)])
        self._limits = self._model.base.limits(config)
        self._losses = served_losses(config.losses.stable_reinforce)
        self._trained: tuple[str, FullParameters] | None = None

    @property
    def limits(self) -> ModelLimits:
        return self._limits

    @property
    def micro_batch_tokens(self) -> int:
        return self._budget

    @property
    def repeats_exactly(self) -> bool:
        return self._device.type == "cpu"

    def create_model(self, model_id: str, spec: LoraSpec) -> None:
        """Begin with the base model's weights. Raises PlaceTaken while another model is trained, and InvalidRequest:
        the id exists, or `spec` asks for an adapter."""
        check_place(spec, model_id, None if self._trained is None else self._trained[0])
        with command_on(self._device, waits=True):
            weights = self._model.read_base()
            copies = {name: tensor.to(self._device, copy=True) for name, tensor in weights.items()}
            parameters = FullParameters(copies, self._device)
            self._model.bind(parameters)
        self._trained = model_id, parameters

    def kinds_of_layers(self, spec: LoraSpec) -> list[str]:
        return []

    def create_probe(self, model_id: str, spec: LoraSpec, kinds: Collection[str] = (), size: float = 0.0) -> None:
        """As `Backend.create_probe`."""
        check_place(spec, model_id, None if self._trained is None else self._trained[0])
        self._trained = model_id, self._model.parameters(self._device)

    def delete_model(self, model_id: str) -> None:
        """A save of the model that still runs goes on with the model's own memory."""
        if self._trained is not None and self._trained[0] == model_id:
            self._trained = None

    def check(self, training_pass: TrainingPass) -> None:
        self._parameters(training_pass.model_id)
        checks.check_pass(training_pass, self._limits, self._losses)

    def run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        """One outcome per pass, in order. A pass that `check` refuses, or with a loss that is not finite, fails with
        InvalidRequest; OutOfMemory, or another error of torch, fails its pass. Raises DeviceFault when the device does
        not answer any more."""
        with command_on(self._device, waits=True):
            return [self._run(training_pass) for training_pass in passes]

    def _run(self, training_pass: TrainingPass) -> PassResult | Exception:
        try:
            self.check(training_pass)
            training_pass = with_sorted_experts(training_pass, self._limits.mixture)
        except Exception as error:  # it is this pass's outcome
            return failure_of(error, self._device)
        parameters = self._parameters(training_pass.model_id)
        # A SinglePassRun only hands its gradient over, which the parameters take as an adapter does
        running = SinglePassRun(cast(Any, parameters), training_pass, self._losses[training_pass.loss_fn])
        for piece in items_of(running, self._budget, self._device):
            run_item(self._model, parameters, piece, backward=training_pass.backward)
        running.add_gradient()
        return running.outcome()

    def check_step(self, params: AdamParams) -> None:
        checks.check_adam(params)

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """See `full.parameters.adamw_step` for metrics and errors. Raises InvalidRequest for hyper-parameters out
        of range."""
        self.check_step(params)
        parameters = self._parameters(model_id)
        with command_on(self._device, waits=True):
            metrics = adamw_step(parameters, params)
            self._model.weights_changed(parameters)
            return metrics

    def clear_gradient(self, model_id: str) -> None:
        self._parameters(model_id).gradient = None

    def save_state(self, model_id: str, directory: Path) -> None:
        with command_on(self._device, waits=False):
            full_model.save_state(self._model, self._parameters(model_id), directory)

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        with command_on(self._device, waits=True):
            full_model.load_state(self._model, self._parameters(model_id), directory, optimizer=optimizer)

    def save_adapter(self, model_id: str, directory: Path, *, dtype: AdapterDtype | None = None) -> None:
        """Write the whole model in Hugging Face's format. `dtype` None: the dtype that the model computes in, which is
        that of vLLM on such a device. Raises FloatingPointError for weights that no sampler takes."""
        chosen = self._model.dtype if dtype is None else getattr(torch, dtype)
        with command_on(self._device, waits=False):
            if not full_model.are_finite(self._parameters(model_id)):
                raise weights_not_finite()
            full_model.save_model(self._model, self._parameters(model_id), directory, chosen)

    def close(self) -> None:
        self._trained = None

    def _parameters(self, model_id: str) -> FullParameters:
        if self._trained is None or self._trained[0] != model_id:
            raise InvalidRequest(f"model_id: there is no model {model_id}")
        return self._trained[1]


def check_place(spec: LoraSpec, model_id: str, trained: str | None) -> None:
    """Raise InvalidRequest for an adapter, for a model of which only a part is to be trained, and for an id that
    exists; PlaceTaken while another model is `trained`."""
    if not spec.is_full:
        raise InvalidRequest(
            f"lora_config.rank: must be 0, got {spec.rank}: this server trains whole models (trainer.full_finetuning)"
        )
    if not (spec.train_attn and spec.train_mlp and spec.train_unembed):
        raise InvalidRequest("lora_config: with rank 0 train_attn, train_mlp and train_unembed must all be true")
    if trained == model_id:
        raise InvalidRequest(f"model_id: {model_id} exists already")
    if trained is not None:
        raise PlaceTaken("lora_config.rank: another model is being trained")


def weights_not_finite() -> FloatingPointError:
    return FloatingPointError(
        "the model's weights hold NaN or infinity, so nothing can be sampled from them: load a checkpoint from before, "
        "and lower the learning rate"
    )


PAGE = 2**24
"""Elements that all ranks together send, or get, at a time: 64 MiB in float32."""


class ShardedState:
    """The tensors of the models that the ranks of a group train, and their files."""

    def __init__(self, group: RankGroup, base: str, facts: FullFacts) -> None:
        """`base`: the path of the base model."""
        self._group = group
        self._facts = facts
        self._layout = ShardLayout(facts.shapes, group.size)
        self._files = ModelFiles(base, facts.architecture, facts.in_files)
        self._page = max(1, PAGE // group.size)

    def save_model(self, model_id: str, directory: Path, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES) -> None:
        """As `state.save_model`."""
        with self._files.written(directory, dtype, shard_bytes) as write:
            for name, begin, values in self._pieces(model_id, "weights", dtype):
                write(name, begin, values)

    def save_state(self, model_id: str, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        """As `state.save_state`."""
        self.save_model(model_id, directory, torch.float32, shard_bytes)
        facts: StateFacts = self._call("state_facts", model_id)[0]
        files = optimizer_files(self._facts.shapes, facts.parts, shard_bytes)
        with TensorFiles(directory, files) as written:
            for part in facts.parts:
                for name, begin, values in self._pieces(model_id, part, torch.float32):
                    written.write(f"{part}.{name}", begin, values)
        describe_state(directory, facts.step, facts.parts, list(files))

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        """As `state.load_state`. Each rank gets its own rows, and changes the model when it has them all."""
        description = read_description(directory)
        parts = description.parts if optimizer else ()
        shapes = self._facts.shapes
        moments = {f"{part}.{name}": shape for part in parts for name, shape in shapes.items()}
        with (
            self._files.opened(directory) as read_weights,
            StoredTensors(description.files if optimizer else (), moments) as others,
        ):
            self._call("begin_load", model_id, parts)
            try:
                self._send("weights", read_weights)
                for part in parts:
                    self._send(part, lambda name, begin, into, part=part: others.read(f"{part}.{name}", begin, into))
            except Exception:
                self._call("abandon_load")
                raise
        self._call("end_load", model_id, description.step if optimizer else 0)

    def _pieces(self, model_id: str, part: str, dtype: torch.dtype) -> Iterator[tuple[str, int, npt.NDArray[np.uint8]]]:
        """All elements of a part, in pieces: a tensor's name, the piece's first element, and its bytes."""
        name, size = str(dtype).removeprefix("torch."), dtype.itemsize
        for start in self._pages():
            pages = self._call("read_part", model_id, part, start, start + self._page, name)
            for rank, page in enumerate(pages):
                for span in self._layout.spans(rank, start, start + self._page):
                    place = (span.place - start) * size
                    yield span.name, span.begin, page[place : place + span.count * size]

    def _send(self, part: str, read: Read) -> None:
        """Send all ranks their elements of a part."""
        for start in self._pages():
            pages: list[Sequence[Any]] = []
            for rank in range(self._layout.ranks):
                spans = list(self._layout.spans(rank, start, start + self._page))
                page = np.empty(sum(span.count for span in spans), np.float32)
                for span in spans:
                    place = span.place - start
                    read(span.name, span.begin, page[place : place + span.count])
                pages.append((part, start, page))
            results_of(self._group.call_each("load_part", pages))

    def _pages(self) -> range:
        return range(0, self._layout.longest, self._page)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return results_of(self._group.call(method, *arguments))


class ShardedFullBackend(BackendOverRanks):
    """Full fine-tuning on several ranks. Each rank holds its rows of all weights, gradients and moments, and runs a
    part of every pass.

    Passes run one at a time, and sums over ranks have a fixed order on CPUs: so results are the same to the last bit
    however passes are grouped, as long as the number of ranks stays the same. Another number of ranks changes the order
    of the sums, so results differ by rounding.

    Files are the same as those of `TorchFullBackend`: each backend reads what the other has written, and what was
    written with another number of ranks.
    """

    merges_passes = False

    def __init__(self, config: ServerConfig, group: RankGroup) -> None:
        """As `BackendOverRanks`."""
        super().__init__(config, group)
        self._state = ShardedState(group, self._path, self._facts)
        self._trained: str | None = None

    @property
    def repeats_exactly(self) -> bool:
        return self._on_cpu

    def create_model(self, model_id: str, spec: LoraSpec) -> None:
        """Begin with the base model's weights. Raises PlaceTaken while another model is trained, and InvalidRequest:
        the id exists, or `spec` asks for an adapter."""
        check_place(spec, model_id, self._trained)
        self._call("create", model_id)
        self._trained = model_id

    def kinds_of_layers(self, spec: LoraSpec) -> list[str]:
        return []

    def create_probe(self, model_id: str, spec: LoraSpec, kinds: Collection[str] = (), size: float = 0.0) -> None:
        """As `Backend.create_probe`."""
        check_place(spec, model_id, self._trained)
        self._call("create_probe", model_id)
        self._trained = model_id

    def delete_model(self, model_id: str) -> None:
        """A save of the model that still runs fails."""
        if self._trained == model_id:
            self._trained = None
            self._call("delete", model_id)

    def _run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        return [self._run_one(each) for each in passes]

    def _run_one(self, training_pass: TrainingPass) -> PassResult | Exception:
        plan = make_plan([(0, training_pass)], self._group.size, self._budget, shared_rows=0)
        if 0 in plan.failed:
            return plan.failed[0]
        try:
            results = self._call("run", training_pass, plan)
        except RankDied:
            raise
        except Exception as error:  # of this pass alone: those before it have added their gradients
            return error
        return outcome_of(training_pass, self._losses[training_pass.loss_fn], 0, plan, results)

    def save_state(self, model_id: str, directory: Path) -> None:
        self._require(model_id)
        self._state.save_state(model_id, directory)

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        self._require(model_id)
        self._state.load_state(model_id, directory, optimizer=optimizer)

    def save_adapter(self, model_id: str, directory: Path, *, dtype: AdapterDtype | None = None) -> None:
        """As `TorchFullBackend.save_adapter`."""
        self._require(model_id)
        chosen = dtype or ("float32" if self._on_cpu else "bfloat16")
        if not all(self._call("is_finite", model_id)):
            raise weights_not_finite()
        self._state.save_model(model_id, directory, getattr(torch, chosen))

    def _require(self, model_id: str) -> None:
        if self._trained != model_id:
            raise InvalidRequest(f"model_id: there is no model {model_id}")
