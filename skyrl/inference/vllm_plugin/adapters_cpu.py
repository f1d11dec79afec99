"""Adapters of a vLLM on a CPU, computed with where they lie: no slot has a copy of a linear layer's matrices.

vLLM reads an adapter's file tensor by tensor, writes zeros into a slot of each layer, and copies the matrices there: a
new version's first token waits for that, and the matrices are twice in memory. `Slots` refers to the matrices instead,
in their own rank. A file in a tmpfs, where unnamed saves are handed over, is mapped; one on a disk is read, because a
mapped file that is cut off ends the process.

Knows vLLM's linear layers and how they fill their slots. Experts, the output layer and layers that divide an adapter's
rank among processes keep vLLM's slots.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from vllm.lora import lora_model
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.classifier import ClassificationHeadWithLoRA
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from skyrl.inference.vllm_plugin.slots import Slots
from skyrl.inference.vllm_plugin.weights.checkpoint import Entry, entries_of, tensors
from skyrl.inference.vllm_plugin.weights.jobs import WeightsError

_STACKS = ("lora_a_stacked", "lora_b_stacked")


def use_adapters_in_place() -> None:
    """Read adapters with `opened`, and give vLLM's linear layers `Slots`."""
    lora_model.safetensors = SimpleNamespace(safe_open=opened)  # type: ignore[attr-defined]
    original = CPUModelRunner.load_lora_model

    @functools.wraps(original)
    def load_lora_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(runner, *args, **kwargs)
        for layer in runner.lora_manager._adapter_manager.modules.values():
            refer(layer)
        return model

    CPUModelRunner.load_lora_model = load_lora_model  # type: ignore[method-assign]


def refer(layer: Any) -> None:
    """Replace the stacked tensors of a linear layer."""
    if not isinstance(layer, BaseLinearLayerWithLoRA) or isinstance(layer, ClassificationHeadWithLoRA):
        return
    if not layer.lora_config.fully_sharded_loras:
        for name in _STACKS:
            setattr(layer, name, tuple(map(Slots, getattr(layer, name))))


@contextmanager
def opened(path: str, framework: str) -> Iterator[OpenedAdapter]:
    """As `safetensors.safe_open`, for vLLM's reader of adapters. Raises SafetensorError for a damaged file, OSError."""
    assert framework == "pt"
    try:
        yield _map(path) or OpenedAdapter(dict(entries_of(Path(path))), None)
    except WeightsError as error:
        raise SafetensorError(str(error)) from error


SHARED_MEMORY = f"/dev/shm/skyrl-{os.getuid()}-"
"""Where `skyrl.storage.checkpoint_store.held` puts files, which are deleted at some time and never change."""
ROOM = 16
"""A file is mapped while the tmpfs has room for so many of its size: mapped ones stay there as long as vLLM keeps them,
also deleted, and the next saves need room."""


def _map(path: str) -> OpenedAdapter | None:
    """A file in memory, in pages that this process shares with others until it writes to them. None for one on a disk,
    or that is to be read. The copy of a save to the disk may replace the link to it at any time."""
    held = os.path.realpath(path)
    if not held.startswith(SHARED_MEMORY):
        return None
    try:
        with open(held, "rb") as file:
            space = os.fstatvfs(file.fileno())
            if space.f_bavail * space.f_frsize < ROOM * os.fstat(file.fileno()).st_size:
                return None
            found = dict(entries_of(Path(held)))
            pages = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    except FileNotFoundError:
        return None

    def tensor(entry: Entry) -> torch.Tensor:
        return pages[entry.begin : entry.end].view(entry.dtype).view(entry.shape)

    return OpenedAdapter(found, tensor)


class OpenedAdapter:
    """The tensors of an adapter's file by their names."""

    def __init__(self, found: dict[str, Entry], read: Callable[[Entry], torch.Tensor] | None) -> None:
        """`read`: gives a tensor; None: all are read from the file."""
        self._found = found
        self._read = read

    def keys(self) -> list[str]:
        return list(self._found)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Raises WeightsError when the file is shorter than its header says."""
        entry = self._found[name]
        if self._read is not None:
            return self._read(entry)
        ((_, tensor),) = tensors({name: entry}, lambda: False, torch.empty)
        return tensor
