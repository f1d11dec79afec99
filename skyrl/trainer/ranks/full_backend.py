"""The backend for full fine-tuning: one model at a time, all of whose parameters are trained.

How a pass is cut, what is recorded of it, and how it fails are those of adapters; an item's gradient is added to that
of its pass tensor by tensor. Files are written from what the ranks send, and sent to them, who see none of them.
Tensors come and go in pages, so that neither the engine nor a rank holds a copy of the model for a save. Knows nothing
of the command log, the wire or the sampler.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from skyrl.base.adapter_files import Target
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.device import HOST, command_on
from skyrl.trainer.files.model_files import ModelFiles, Read
from skyrl.trainer.files.tensor_files import StoredTensors, TensorFiles
from skyrl.trainer.full.full_model import SHARD_BYTES, describe_state, optimizer_files, read_description
from skyrl.trainer.protocol import AdapterDtype, InvalidRequest, PassResult, PlaceTaken, RankDied, TrainingPass
from skyrl.trainer.ranks.full_rank import FullFacts, FullRank, StateFacts
from skyrl.trainer.ranks.lora_backend import BackendOverRanks, RankGroup, results_of
from skyrl.trainer.shares import ShardLayout


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
        """Write the weights, rounded to the nearest `dtype`, and what belongs to them (`ModelFiles`)."""
        with self._files.written(directory, dtype, shard_bytes) as write:
            for name, begin, values in self._pieces(model_id, "weights", dtype):
                write(name, begin, values)

    def save_state(self, model_id: str, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        """Write the model in float32, and the moments and the pending gradient if there are any: float32 tensors named
        `<part>.<parameter>`, in files of at most `shard_bytes` or one tensor."""
        self.save_model(model_id, directory, torch.float32, shard_bytes)
        facts: StateFacts = self._call("state_facts", model_id)[0]
        files = optimizer_files(self._facts.shapes, facts.parts, shard_bytes)
        with TensorFiles(directory, files) as written:
            for part in facts.parts:
                for name, begin, values in self._pieces(model_id, part, torch.float32):
                    written.write(f"{part}.{name}", begin, values)
        describe_state(directory, facts.step, facts.parts, list(files))

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        """Replace the weights. With `optimizer`, also replace the moments, step count and pending gradient; without it,
        drop them. Each rank gets its own rows, and changes the model when it has them all.

        Raises InvalidRequest for the checkpoint of an adapter; OSError, ValueError or SafetensorError when files are
        missing or damaged. Nothing changes on an error."""
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


class FullBackend(BackendOverRanks):
    """Full fine-tuning: float32 on CPUs; on CUDA bfloat16, with float32 weights, gradients and moments. Of several
    ranks each holds its rows of all of these, and runs a part of every pass.

    Passes run one at a time, and sums over ranks have a fixed order on CPUs: so results are the same to the last bit
    however passes are grouped, as long as the number of ranks stays the same. Another number of ranks changes the order
    of the sums, so results differ by rounding.

    Files do not depend on the number of ranks: what was written with one is read with another.
    """

    rank_class = FullRank
    merges_passes = False

    def __init__(self, config: ServerConfig, group: RankGroup | None = None) -> None:
        """As `BackendOverRanks`."""
        super().__init__(config, group)
        self._state = ShardedState(self.group, self._path, self._facts)
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

    def layers_of(self, spec: LoraSpec) -> tuple[Target, ...]:
        return ()

    def create_probe(self, model_id: str, spec: LoraSpec, kinds: Collection[str] = (), size: float = 0.0) -> None:
        """As `Backend.create_probe`."""
        check_place(spec, model_id, self._trained)
        self._call("create_probe", model_id)
        self._trained = model_id

    def delete_model(self, model_id: str) -> None:
        """A save of the model that still runs goes on without other ranks; with them it fails."""
        if self._trained == model_id:
            self._trained = None
            self._call("delete", model_id)

    def _run(self, passes: Sequence[TrainingPass]) -> list[PassResult | Exception]:
        return [self._run_one(each) for each in passes]

    def _run_one(self, training_pass: TrainingPass) -> PassResult | Exception:
        try:
            return self._run_planned([training_pass], merge=False, shared_rows=0)[0]
        except RankDied:
            raise
        except Exception as error:  # of this pass alone: those before it have added their gradients
            return error

    def save_state(self, model_id: str, directory: Path) -> None:
        with self._saving(model_id):
            self._state.save_state(model_id, directory)

    def restore_model(self, model_id: str, spec: LoraSpec, directory: Path) -> None:
        """As `Backend.restore_model`. Also raises SafetensorError when files are damaged."""
        self.create_model(model_id, spec)
        try:
            self.load_state(model_id, directory, optimizer=True)
        except Exception:
            self.delete_model(model_id)
            raise

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        self._require(model_id)
        with command_on(HOST, waits=False):
            self._state.load_state(model_id, directory, optimizer=optimizer)

    def save_adapter(self, model_id: str, directory: Path, *, dtype: AdapterDtype | None = None) -> None:
        """Write the whole model in Hugging Face's format. `dtype` None: the dtype that the model computes in, which is
        that of vLLM on such a device. Raises FloatingPointError for weights that no sampler takes."""
        chosen = dtype or ("float32" if self._on_cpu else "bfloat16")
        with self._saving(model_id):
            if not all(self._call("is_finite", model_id)):
                raise weights_not_finite()
            self._state.save_model(model_id, directory, getattr(torch, chosen))

    @contextmanager
    def _saving(self, model_id: str) -> Iterator[None]:
        self._require(model_id)
        self._call("begin_save", model_id)
        try:
            with command_on(HOST, waits=False):
                yield
        finally:
            self._call("end_save", model_id)

    def _require(self, model_id: str) -> None:
        if self._trained != model_id:
            raise InvalidRequest(f"model_id: there is no model {model_id}")
