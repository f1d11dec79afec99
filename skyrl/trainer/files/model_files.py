"""Which tensors of a release's files make each parameter of transformers' model, and a trained model as such files.

transformers says how a release differs from its model: other names, one tensor for each expert where its model has one
for all, or rows and columns exchanged. The rules are read from it; the tensors are put together here, because a rank
reads only its rows. A trained model is written with the release's names and division of experts into tensors: so all
that loads the base model loads it. What the trainer has no use for is copied from the base model: a vision tower,
layers that predict further tokens, the corrections of routers' scores. Knows transformers' rules. Knows nothing of
ranks or adapters.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from torch import Tensor
from transformers import GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from skyrl.base.config.server import ConfigError
from skyrl.trainer.files.config import read_config
from skyrl.trainer.files.tensor_files import PLAIN, StoredTensors, StoredWeights, sharded_files, weight_files
from skyrl.trainer.files.turns import InTurns, Turns
from skyrl.trainer.quantized.weights import QuantizedSlice, StoredForm, stacked


class Rows(Protocol):
    """A tensor of which only some rows are read: one of the files, or several that make one tensor."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the files' tensors whose elements, one tensor after the other, are this tensor's.

        Raises ValueError if its elements have another order in the files."""
        ...

    @property
    def form(self) -> StoredForm | None:
        """How the files hold it in fewer bits; None if they do not, or not in a form that can be kept."""
        ...

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, rows: slice) -> Tensor: ...


@dataclass(frozen=True)
class _OfFile:
    """A tensor as the files hold it. `stored`: safetensors' slice."""

    name: str
    stored: Any

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {self.name: tuple(self.get_shape())}

    @property
    def form(self) -> StoredForm | None:
        return self.stored.form if isinstance(self.stored, QuantizedSlice) else None

    def get_shape(self) -> list[int]:
        return list(self.stored.get_shape())

    def __getitem__(self, rows: slice) -> Tensor:
        return self.stored[rows]


@dataclass(frozen=True)
class _JoinedExperts:
    """One tensor of all experts, whose files hold one tensor for each expert and projection. `parts[e]`: the stored
    tensors of expert e, whose rows follow each other."""

    parts: Sequence[Sequence[Rows]]

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return _one_after_the_other([part for parts in self.parts for part in parts])

    @property
    def form(self) -> StoredForm | None:
        pieces = [stacked([part.form for part in of_projection]) for of_projection in zip(*self.parts, strict=True)]
        known = tuple(piece for piece in pieces if piece is not None)
        return StoredForm(known) if len(known) == len(pieces) else None

    def get_shape(self) -> list[int]:
        shapes = [part.get_shape() for part in self.parts[0]]
        return [len(self.parts), sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def __getitem__(self, rows: slice) -> Tensor:
        return torch.stack([torch.cat([part[:] for part in parts]) for parts in self.parts[rows]])


@dataclass(frozen=True)
class _Concatenated:
    """Tensors whose rows follow each other. All are read, whichever rows are asked for: they are small."""

    parts: Sequence[Rows]

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return _one_after_the_other(self.parts)

    @property
    def form(self) -> StoredForm | None:
        forms = [part.form for part in self.parts]
        known = [form for form in forms if form is not None and not form.exchanged]
        return StoredForm(tuple(piece for form in known for piece in form.pieces)) if len(known) == len(forms) else None

    def get_shape(self) -> list[int]:
        shapes = [part.get_shape() for part in self.parts]
        return [sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def __getitem__(self, rows: slice) -> Tensor:
        return torch.cat([part[:] for part in self.parts])[rows]


@dataclass(frozen=True)
class _Transposed:
    """A tensor [experts, columns, rows] of the files as [experts, rows, columns]."""

    stored: Rows

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        raise ValueError(f"its files hold {', '.join(self.stored.tensors)} with rows and columns exchanged")

    @property
    def form(self) -> StoredForm | None:
        found = self.stored.form
        return None if found is None else replace(found, exchanged=not found.exchanged)

    def get_shape(self) -> list[int]:
        experts, columns, rows = self.stored.get_shape()
        return [experts, rows, columns]

    def __getitem__(self, rows: slice) -> Tensor:
        return self.stored[rows].transpose(1, 2)


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the files. It holds elements of a parameter, those from `place` on; with `turns`, in their order."""

    name: str
    shape: tuple[int, ...]
    place: int
    turns: Turns | None = None

    @property
    def count(self) -> int:
        """Of the parameter's elements."""
        return math.prod(self.shape if self.turns is None else self.turns.shape)

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """As `Turns.runs`."""
        return iter([(begin, begin, end)]) if self.turns is None else self.turns.runs(begin, end)


def file_tensors(path: str, model: Any, stored: Mapping[str, Rows]) -> dict[str, list[FileTensor]]:
    """The files' tensors that hold each parameter of the model from `path`. A tied one has one name, and the files may
    hold it more than once. `stored`: from `stored_parameters`.

    Raises ConfigError if a parameter's elements have another order in the files."""
    first: dict[int, str] = {}
    found: dict[str, list[FileTensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        of_parameter = found.setdefault(first.setdefault(id(parameter), name), [])
        place, rows = 0, stored.get(name)
        if isinstance(rows, InTurns):
            of_parameter.append(FileTensor(rows.name, rows.turns.whole, place, rows.turns))
            continue
        try:
            tensors = {} if rows is None else rows.tensors
        except ValueError as error:
            raise ConfigError(f"base_model: {path}: {error}, and a trained model is written as it is read") from error
        for tensor, shape in tensors.items():
            of_parameter.append(FileTensor(tensor, shape, place))
            place += of_parameter[-1].count
    return found


def _one_after_the_other(parts: Sequence[Rows]) -> dict[str, tuple[int, ...]]:
    return {name: shape for part in parts for name, shape in part.tensors.items()}


def stored_parameters(model: Any, shapes: Mapping[str, Sequence[int]], stored: Mapping[str, Any]) -> dict[str, Rows]:
    """The parameters and buffers of a model that the files hold, by name.

    shapes: of all parameters and buffers, by the names that they have in transformers' model. `stored`: the files'
    readers by tensor name. Tensors that belong to no parameter are left out, as transformers does.

    Raises ValueError for a conversion that is not known here."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    names = dict(shapes)
    found: dict[str, Rows] = {}
    converted: dict[str, dict[str, list[Rows]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if name not in shapes and key in shapes:
            name, pattern = key, None
        if name not in shapes:
            continue
        tensor = _OfFile(key, stored[key].get_slice(key))
        if pattern is None:
            found[name] = tensor
        else:
            converted.setdefault(name, {}).setdefault(pattern, []).append(tensor)
    for name, parts in converted.items():
        rule = by_pattern[next(iter(parts))]
        of_patterns = [parts.get(pattern, []) for pattern in rule.source_patterns]
        first, *_ = rule.target_patterns
        for number, target in enumerate(rule.target_patterns):
            own = name.replace(first, target) if number else name
            made = _converted(rule, of_patterns, shapes[own], number)
            if made is not None:
                found[own] = made
    return found


def _converted(
    rule: WeightConverter, parts: Sequence[Sequence[Rows]], shape: Sequence[int], number: int
) -> Rows | None:
    """Number `number` of the tensors that the rule makes. `parts`: the tensors of each of the rule's patterns, in the
    order of their numbers. None if some are lacking."""
    if not all(parts) or len(set(map(len, parts))) > 1:
        return None
    match rule.operations:
        case [MergeModulelist(dim=0)] | [MergeModulelist(dim=0), Concatenate(dim=1)]:
            return _JoinedExperts(list(zip(*parts, strict=True)))
        case [Concatenate(dim=0)]:
            return _Concatenated([part for (part,) in parts])
        case [Transpose(dim0=1, dim1=2, check_dims=True)]:
            ((tensor,),) = parts
            return tensor if tensor.get_shape() == list(shape) else _Transposed(tensor)
        case [Interleave(inverse=False, dim=dim)]:
            ((tensor,),) = parts
            return InTurns(next(iter(tensor.tensors)), tensor, Turns(tuple(tensor.get_shape()), dim, None))
        case [Interleave(inverse=False, dim=dim), Chunk(dim=of_chunks)] if dim == of_chunks:
            ((tensor,),) = parts
            return InTurns(next(iter(tensor.tensors)), tensor, Turns(tuple(tensor.get_shape()), dim, number))
    kinds = ", ".join(type(operation).__name__ for operation in rule.operations)
    raise ValueError(f"its files hold {rule.source_patterns[0]} in a form that cannot be read by rows ({kinds})")


_BESIDE_WEIGHTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
Write = Callable[[str, int, npt.NDArray[np.uint8]], None]
"""Writes a parameter's elements, from one of its elements on: their bytes in the files' dtype."""
Read = Callable[[str, int, npt.NDArray[np.float32]], None]
"""Fills an array with a parameter's elements, from one of its elements on."""


@dataclass(frozen=True)
class _Part:
    """Elements of the tensor `name`, from `begin` on: those of a piece of a parameter, from `place` to `end`."""

    name: str
    begin: int
    place: int
    end: int


class ModelFiles:
    """Writes and reads models of the architecture of the base model at the path `base`, with its config.json and its
    tokenizer."""

    def __init__(self, base: str, architecture: str, in_files: Mapping[str, Sequence[FileTensor]]) -> None:
        """`architecture`: the model's class in transformers. `in_files`: see `file_tensors`. Finds the base model's
        files, and which other tensors they hold."""
        self._base = base
        self._architecture = architecture
        self._in_files = in_files
        self._once = {name: _once(tensors) for name, tensors in in_files.items()}
        self._paths = weight_files(base)
        self._described = read_config(base)
        self._trained = _shapes(in_files)
        with self._base_weights(torch.float32) as stored:
            self._others = [name for name in stored.keys() if name not in self._trained]  # noqa: SIM118

    @contextmanager
    def written(self, directory: Path, dtype: torch.dtype, shard_bytes: int) -> Iterator[Write]:
        """Files in which parameters have this dtype, of at most `shard_bytes` or one tensor. All elements of all
        parameters must be written; all else is written here."""
        with self._base_weights(dtype) as stored:
            slices = {name: stored.get_slice(name) for name in self._others}
            shapes = self._trained | {name: tuple(each.get_shape()) for name, each in slices.items()}
            dtypes = dict.fromkeys(self._trained, dtype)
            dtypes |= {name: PLAIN[each.get_dtype()] for name, each in slices.items()}
            described = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
            totals = {"total_parameters": sum(tensor.numel() for tensor in described.values())}
            with sharded_files(directory, described, shard_bytes, totals) as tensors:
                for name, each in slices.items():
                    tensors.write(name, 0, bytes_of(each[...]))

                def write(name: str, begin: int, values: npt.NDArray[np.uint8]) -> None:
                    size = dtype.itemsize
                    for part in _parts(self._in_files[name], begin, len(values) // size):
                        tensors.write(part.name, part.begin, values[part.place * size : part.end * size])

                yield write
        self._describe(directory, dtype)

    def _describe(self, directory: Path, dtype: torch.dtype) -> None:
        config: Any = self._described.config
        config.architectures = [self._architecture]
        config.save_pretrained(directory)
        written = directory / "config.json"
        described = json.loads(written.read_text())
        for part in (described, described.get("text_config", {})):
            part["dtype"] = str(dtype).removeprefix("torch.")
        written.write_text(json.dumps(described, indent=2) + "\n")
        # The base model's own file takes its place, if there is one: saving that again fails for values of which
        # transformers warns
        GenerationConfig().save_pretrained(directory)
        for file in files_beside_weights(self._base):
            shutil.copyfile(file, directory / file.name)

    @contextmanager
    def opened(self, directory: Path) -> Iterator[Read]:
        """Files in which parameters are float32. What is not trained may be missing, and so may second names of tied
        parameters. Raises OSError, ValueError or SafetensorError when files are missing or damaged, or hold another
        model."""
        files = sorted(directory.glob("model*.safetensors"))
        needed = _shapes(self._once)
        with StoredTensors(files, needed, {*self._others, *self._trained} - needed.keys()) as tensors:

            def read(name: str, begin: int, into: npt.NDArray[np.float32]) -> None:
                for part in _parts(self._once[name], begin, len(into)):
                    tensors.read(part.name, part.begin, into[part.place : part.end])

            yield read

    def _base_weights(self, dtype: torch.dtype) -> StoredWeights:
        return StoredWeights(self._base, self._paths, self._described.format, dtype)


def _shapes(in_files: Mapping[str, Sequence[FileTensor]]) -> dict[str, tuple[int, ...]]:
    return {each.name: each.shape for tensors in in_files.values() for each in tensors}


def _once(tensors: Sequence[FileTensor]) -> list[FileTensor]:
    """Without those that hold a tied parameter again."""
    found: list[FileTensor] = []
    for tensor in tensors:
        if found and tensor.place == 0:
            break
        found.append(tensor)
    return found


def _parts(tensors: Sequence[FileTensor], begin: int, count: int) -> Iterator[_Part]:
    """Where `count` elements of a parameter are in the files."""
    for tensor in tensors:
        low, high = max(begin, tensor.place), min(begin + count, tensor.place + tensor.count)
        for at, first, last in tensor.runs(low - tensor.place, high - tensor.place) if low < high else ():
            yield _Part(tensor.name, at, tensor.place + first - begin, tensor.place + last - begin)


def bytes_of(values: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor's elements, flat."""
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


@cache
def files_beside_weights(base: str) -> tuple[Path, ...]:
    """The files of a model's tokenizer and processor, as many as it has. Those of a model of the hub are fetched once,
    because the process that saves need not have loaded them; without the hub, those that are in its cache."""
    if Path(base).is_dir():
        return tuple(file for name in _BESIDE_WEIGHTS if (file := Path(base) / name).is_file())
    with suppress(OSError):
        snapshot_download(base, allow_patterns=[*_BESIDE_WEIGHTS])
    found = [try_to_load_from_cache(base, name) for name in _BESIDE_WEIGHTS]
    return tuple(Path(file) for file in found if isinstance(file, str))
