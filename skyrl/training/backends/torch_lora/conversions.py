"""Which tensors of a release's files make each parameter of transformers' model, read by rows.

transformers says how a release differs from its model: other names, one tensor for each expert where its model has one
for all, or rows and columns exchanged. The rules are read from it; the tensors are put together here, because a rank
reads only its rows. What ranks write is named and divided as it was read.
Knows transformers' rules. Knows nothing of files, ranks or adapters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from skyrl.base.config.server import ConfigError
from skyrl.training.backends.torch_lora.quantized_slices import QuantizedSlice, StoredForm, stacked


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
    """A tensor of the files. It holds elements of a parameter, those from `place` on."""

    name: str
    shape: tuple[int, ...]
    place: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def file_tensors(path: str, model: Any, stored: Mapping[str, Rows]) -> dict[str, list[FileTensor]]:
    """The files' tensors that hold each parameter of the model from `path`. A tied one has one name, and the files may
    hold it more than once. `stored`: from `stored_parameters`.

    Raises ConfigError if a parameter's elements have another order in the files."""
    first: dict[int, str] = {}
    found: dict[str, list[FileTensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        of_parameter = found.setdefault(first.setdefault(id(parameter), name), [])
        place = 0
        try:
            tensors = stored[name].tensors if name in stored else {}
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
        made = _converted(rule, [parts.get(pattern, []) for pattern in rule.source_patterns], shapes[name])
        if made is not None:
            found[name] = made
    return found


def _converted(rule: WeightConverter, parts: Sequence[Sequence[Rows]], shape: Sequence[int]) -> Rows | None:
    """`parts`: the tensors of each of the rule's patterns, in the order of their numbers. None if some are lacking."""
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
    kinds = ", ".join(type(operation).__name__ for operation in rule.operations)
    raise ValueError(f"its files hold {rule.source_patterns[0]} in a form that cannot be read by rows ({kinds})")
