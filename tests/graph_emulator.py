"""CUDA graphs emulated on a CPU: a capture records operations with their tensors and numbers, a replay runs those.

The emulator refuses in a capture what CUDA refuses, and also what CUDA would let through with wrong results later:
memory that is none of the graph's places, and numbers or tensors that have changed since the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from skyrl.trainer.graphs.recorder import Compute

WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
BY_INDEX = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)
"""They wait for the device only if an index is a mask."""


class Refused(RuntimeError):
    """What a captured function must not do."""


@dataclass
class Step:
    """One operation. `said`: what must be the same in each call."""

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    results: list[Tensor]
    said: list[Any]


@dataclass
class Recording(TorchDispatchMode):
    """Records what runs inside."""

    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._outside = {_storage(each) for each in (*self.reads, *self.writes)}
        self._kept = {_storage(each) for each in self.reads}
        self._made: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        _refuse_waits(func, args, options)
        if options.get("device") is not None and func is torch.ops.aten._to_copy.default:
            raise Refused(f"{func} copies from one device to another")
        leaves, form = tree_flatten((args, options))
        said = [func, form, *(self._said(func, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)]
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else options.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            written = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
            if is_written and any(_storage(each) in self._kept for each in written):
                raise Refused(f"{func} changes an input")
        returned = func(*args, **options)
        results = [each for each in tree_leaves(returned) if isinstance(each, Tensor)]
        for each in results:
            if _storage(each) not in self._outside:
                self._made.setdefault(_storage(each), len(self._made))
        self.steps.append(Step(func, args, options, results, said))
        return returned

    def _said(self, func: Any, tensor: Tensor) -> Any:
        """Of memory outside its address, and of memory inside the number of the operation that made it."""
        storage = _storage(tensor)
        if storage in self._outside:
            where: Any = ("outside", storage)
        elif storage in self._made:
            where = ("inside", self._made[storage])
        else:
            raise Refused(f"{func} reads memory that is none of the graph's places, or comes from the host")
        return where, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


class EmulatedGraphs:
    """A `Recorder`. Each replay also calls the function again, and raises Refused if that does anything else than what
    was captured, or gives other bits."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self.waited = 0

    def capture(self, compute: Compute, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Callable[[], None]:
        run_without_values(compute, reads, writes)
        captured = _recorded(compute, reads, writes)
        for each in writes:
            _spoil(each)
        outside = {_storage(each) for each in (*reads, *writes)}
        made = {_storage(each): each for step in captured for each in step.results if _storage(each) not in outside}
        between = [torch.empty(0, dtype=torch.uint8).set_(each.untyped_storage()) for each in made.values()]
        self.held_bytes = max(self.held_bytes, sum(each.nbytes for each in between))

        def replay() -> None:
            again = _recorded(compute, reads, writes)
            expected = [each.clone() for each in writes]
            _compare(captured, again)
            for each in (*writes, *between):
                _spoil(each)
            for step in captured:
                _repeat(step)
            for number, (each, value) in enumerate(zip(writes, expected, strict=True)):
                if not torch.equal(each.contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)):
                    raise Refused(f"the replay's result {number} is not the function's")

        return replay

    def wait(self) -> None:
        self.waited += 1

    def forget(self) -> None:
        self.held_bytes = 0


def run_without_values(compute: Compute, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    """Run the function on tensors of torch's meta device, which have no values. Raises an error where it asks for
    values, or has tensors elsewhere."""
    meta = [[_on_meta(each) for each in tensors] for tensors in (reads, writes)]
    with _OnMeta():
        compute(*meta)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _OnMeta(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        _refuse_waits(func, args, options)
        returned = func(*args, **options)
        for each in tree_leaves((args, options, returned)):
            if isinstance(each, Tensor) and each.device.type != "meta":
                raise Refused(f"{func} has a tensor on the host")
        return returned


def _refuse_waits(func: Any, args: Any, options: Any) -> None:
    if func in BY_INDEX:
        indices = [each for each in tree_leaves(args[1]) if isinstance(each, Tensor)]
        waits = any(each.dtype in (torch.bool, torch.uint8) for each in indices)
    else:
        waits = any(tag in WAITS for tag in func.tags)
    if waits:
        raise Refused(f"{func} waits for the device")


def _recorded(compute: Compute, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> list[Step]:
    with Recording(reads, writes) as recording:
        compute(reads, writes)
    return recording.steps


def _compare(captured: Sequence[Step], again: Sequence[Step]) -> None:
    for number, (one, other) in enumerate(zip(captured, again, strict=False)):
        if one.said != other.said:
            changed = [pair for pair in zip(one.said, other.said, strict=False) if pair[0] != pair[1]]
            raise Refused(f"operation {number}, {one.function}, has changed since the capture: {changed}")
    if len(captured) != len(again):
        raise Refused(f"{len(captured)} operations were captured, and now there are {len(again)}")


def _repeat(step: Step) -> None:
    """Run an operation on the tensors of the capture, and write its results where they were."""
    returned = step.function(*step.args, **step.options)
    new = [each for each in tree_leaves(returned) if isinstance(each, Tensor)]
    for place, value in zip(step.results, new, strict=True):
        if _storage(place) != _storage(value):
            place.copy_(value)


def _spoil(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else 255)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
