"""A backend on torch's meta device, whose tensors have shapes and no numbers: models of any size train in a second.

The backend is the real one, with CUDA's dtypes and branches (`operations.as_on_cuda`): its plan, its micro-batches and
all operations that it starts are those of a GPU. Where it asks the device for a number it gets 1. Its base model is
made of config.json alone, and not compared with transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config

from benchmarks.cuda_attention import attention_as_on_cuda
from benchmarks.operations import as_on_cuda
from skyrl.base.config.backend import Kernels
from skyrl.base.config.pass_memory import MOST_LOGITS_BYTES
from skyrl.trainer.device import HostCopy, base_dtype
from skyrl.trainer.files.config import read_config
from skyrl.trainer.graphs.pieces import Graphs
from skyrl.trainer.model.base_model import BaseModel, fuse_norms
from skyrl.trainer.model.loading import model_class
from skyrl.trainer.model.recomputation import Setting
from skyrl.trainer.model.row_budget import BudgetSettings
from skyrl.trainer.ranks import rank, sharded_model
from skyrl.trainer.ranks.sharded_model import ModelForm, ShardedModel
from skyrl.trainer.shares import EVERY_EXPERT

META = torch.device("meta")
SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Of Qwen3-0.6B and Qwen3-8B: their config.json."""
_TIED = {"0.6b"}
_COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}


def make_config(directory: Path, model: str, layers: int | None = None) -> str:
    """A directory with the config.json of one of `SHAPES`, perhaps with another number of layers. Returns the path."""
    sizes: dict[str, Any] = {**SHAPES[model], **_COMMON, **({} if layers is None else {"num_hidden_layers": layers})}
    Qwen3Config(**sizes, tie_word_embeddings=model in _TIED).save_pretrained(directory)
    return str(directory)


@contextmanager
def as_on_meta() -> Iterator[None]:
    """Inside, a new backend computes shapes on the meta device, with chunks of logits as on a card of 80 GB."""
    with ExitStack() as stack:
        stack.enter_context(as_on_cuda())
        stack.enter_context(patch.object(rank, "prepare_device", lambda threads: META))
        stack.enter_context(patch.object(rank, "load_sharded_model", _load))
        stack.enter_context(patch.object(BudgetSettings, "logits_bytes", lambda *_: MOST_LOGITS_BYTES))
        stack.enter_context(patch.object(HostCopy, "read", _read))
        stack.enter_context(attention_as_on_cuda())
        stack.enter_context(_Answers())
        yield


_read_copy = HostCopy.read


def _read(copy: HostCopy) -> Any:
    """Finite numbers in the place of those that do not exist."""
    copy._host = torch.zeros(copy._host.shape, dtype=copy._host.dtype)
    return _read_copy(copy)


class _Answers(TorchDispatchMode):
    """Gives ones where the host asks for numbers of the meta device: these count as finite, and as there."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if name == "_local_scalar_dense":
                return 1.0
            device = (kwargs or {}).get("device")
            if name == "_to_copy" and device is not None and torch.device(device).type == "cpu":
                dtype = (kwargs or {}).get("dtype") or args[0].dtype
                return torch.ones(args[0].shape, dtype=dtype)
        return func(*args, **(kwargs or {}))


def make_graphs() -> Graphs:
    raise NotImplementedError("graphs_on_meta makes them")


def _load(
    path: str,
    device: torch.device,
    mesh: None,
    form: ModelForm,
    *,
    gradient_checkpointing: Setting,
    pictures: bool,
    varlen: bool,
    kernels: Kernels,
    graphs: bool,
    agree: Any,
) -> ShardedModel:
    """As `load_sharded_model` on one device, without weights."""
    config = read_config(path).config
    dtype = form.dtype(device) if form.trained else base_dtype(device)
    with device:
        model: Any = model_class(config).from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    model.eval().requires_grad_(form.trained)
    packed = form.packed(path, model)
    packed.use_own_kernels(varlen=varlen, between=sharded_model.between_for(kernels, device))
    packed.logprobs_in_kernels = kernels == "triton"
    fuse_norms(packed)
    packed.recompute(gradient_checkpointing)
    if graphs:
        packed.use_graphs(make_graphs())
    total = sum(parameter.numel() for parameter in packed.parameters())
    return ShardedModel(BaseModel(path, device, packed, config), EVERY_EXPERT, dtype, total, {}, None)
