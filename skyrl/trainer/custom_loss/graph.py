"""Runs the graph of a custom loss on one sequence, within bounds.

The tensors are the host's: there a wrong index is an error of one pass, and no fault of a device. Before an operation
runs, its result is known to be small enough: from the sizes of its arguments, or from the same operation on torch's
`meta` device, which gives shapes alone. `check` runs the whole graph there, up to an index by a mask, the size of whose
result follows from values. Knows nothing of passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from skyrl.base.types.custom_loss import CREATIONS, CustomLoss, Device, Dtype, LossNode, Ref
from skyrl.trainer.custom_loss.operations import COMBINING, FUNCTIONS, MASKED, METHODS, PRODUCTS, SIZED
from skyrl.trainer.device import HOST, failure_of
from skyrl.trainer.protocol import InvalidRequest, OutOfMemory

MAX_ELEMENTS = 2**26
"""Numbers in the results of all operations for one sequence: 256 MiB as float32, and as much again for a backward."""
MAX_WORK = 2**30
"""Numbers that the operations for the sequences of a micro-batch read and write, and what an operation costs beside."""
OPERATION = 2**10
"""What an operation costs, in numbers that it could read in the same time."""

META = torch.device("meta")


@dataclass
class Work:
    """What a micro-batch has used of MAX_WORK."""

    done: int = 0

    def add(self, cost: int) -> None:
        """Raises InvalidRequest when there is too much."""
        self.done += cost
        if self.done > MAX_WORK:
            raise InvalidRequest(
                f"loss_fn: the custom loss takes more than {MAX_WORK} steps; send fewer sequences at once"
            )


@dataclass(frozen=True)
class LossOutput:
    """Of one sequence. metrics: by name. gradient: with respect to logprobs, float32 of their shape; None without a
    backward."""

    loss: float
    metrics: Mapping[str, float]
    gradient: Tensor | None = None


class _DependsOnValues(Exception):
    """The size of a result cannot be known without values."""


@dataclass
class _Run:
    """`values`: of the nodes so far. `elements`: how many numbers they have together."""

    device: torch.device
    work: Work
    values: dict[str, Any] = field(default_factory=dict)
    elements: int = 0


class LossGraph:
    """A checked `CustomLoss`."""

    def __init__(self, loss: CustomLoss) -> None:
        self.loss = loss

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raise InvalidRequest naming the node, for inputs of these shapes and dtypes: `logprobs` and the others in
        order, on the meta device."""
        with torch.enable_grad():
            leaf = inputs[0].requires_grad_()
            try:
                self._compute([leaf, *inputs[1:]], _Run(META, Work()))
            except _DependsOnValues:
                return

    def evaluate(self, inputs: Sequence[Tensor], work: Work, *, backward: bool) -> LossOutput:
        """The loss of one sequence. inputs: as in `check`, on the host. Raises InvalidRequest, also for a loss or a
        gradient that is not finite."""
        run = _Run(HOST, work)
        with torch.set_grad_enabled(backward):
            leaf = inputs[0].detach().requires_grad_(backward)
            loss, metrics = self._compute([leaf, *inputs[1:]], run)
            output = LossOutput(_number(loss), {name: _number(value) for name, value in metrics.items()})
            if not math.isfinite(output.loss):
                raise self._not_finite(output.loss, run.values)
            if not backward:
                return output
            with self._named(None):
                (gradient,) = torch.autograd.grad(loss, [leaf])
        if not gradient.isfinite().all():
            raise self.refusal(
                "its gradient is not finite: an operation such as sqrt or log is at the edge of where it is defined, "
                "also in a branch that torch.where leaves out"
            )
        return replace(output, gradient=gradient)

    def refusal(self, message: str, node: LossNode | None = None) -> InvalidRequest:
        where = "" if node is None else f"node {node.name!r} ({node.target}): "
        return InvalidRequest(f"loss_fn: custom loss {self.loss.name!r}: {where}{message}")

    def _compute(self, inputs: Sequence[Tensor], run: _Run) -> tuple[Tensor, Mapping[str, Any]]:
        """The loss and the metrics, checked: of one number each."""
        given = iter(inputs)
        for node in self.loss.nodes[:-1]:
            if node.op == "placeholder":
                run.values[node.name] = next(given)
                continue
            with self._named(node):
                run.values[node.name] = self._result_of(node, run)
        loss, metrics = _filled(self.loss.nodes[-1].args[0], run)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            shape = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise self.refusal(f"must return a scalar loss, got {shape}")
        if inputs[0].requires_grad and not loss.requires_grad:
            raise self.refusal("its loss does not depend on logprobs, so that it has no gradient")
        for name, value in metrics.items():
            if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
                raise self.refusal(f"metric {name!r} must be one number")
        return loss, metrics

    def _result_of(self, node: LossNode, run: _Run) -> Any:
        args = [_filled(each, run) for each in node.args]
        kwargs = {name: _filled(each, run) for name, each in node.kwargs.items()}
        if node.target.removeprefix("torch.") in CREATIONS and node.op == "call_function":
            kwargs["device"] = run.device
        if run.device == META:
            if node.target in MASKED and _has_tensors(args[1:]) and not _is_integers(args[1:]):
                raise _DependsOnValues
        elif run.elements + _most(node, args, kwargs, MAX_ELEMENTS - run.elements) > MAX_ELEMENTS:
            raise self._too_large(node)
        if _word(node) == "matmul" and run.elements + _copied(args, kwargs) > MAX_ELEMENTS:
            raise self._too_large(node)
        result = _call(node, args, kwargs)
        size = sum(each.numel() for each in _tensors(result))
        read = sum(each.numel() for each in _tensors(args))
        if _word(node) in PRODUCTS and isinstance(args[0], Tensor) and args[0].dim() > 0:
            read += size * args[0].size(-1)
        run.elements += size
        if run.elements > MAX_ELEMENTS:
            raise self._too_large(node)
        run.work.add(OPERATION + size + read)
        return result

    def _too_large(self, node: LossNode) -> InvalidRequest:
        return self.refusal(f"the results up to here have more than {MAX_ELEMENTS} numbers for one sequence", node)

    @contextmanager
    def _named(self, node: LossNode | None) -> Iterator[None]:
        """Name the node in torch's errors: they are the client's, but for a lack of memory."""
        try:
            yield
        except (InvalidRequest, _DependsOnValues):
            raise
        except Exception as error:
            failure = failure_of(error, HOST)
            if isinstance(failure, OutOfMemory):
                raise failure from error
            said = str(error).strip().partition("\n")[0][:300]
            raise self.refusal(said or type(error).__name__, node) from error

    def _not_finite(self, loss: float, values: Mapping[str, Any]) -> InvalidRequest:
        """Names the first node that gives NaN, or else infinity."""
        for is_wrong, what in ((torch.isnan, "NaN"), (torch.isinf, "infinity")):
            for node in self.loss.nodes[:-1]:
                if any(each.is_floating_point() and is_wrong(each).any() for each in _tensors(values[node.name])):
                    return self.refusal(f"its loss is {loss}; {what} first comes from this node", node)
        return self.refusal(f"its loss is {loss}")


def _number(value: Any) -> float:
    return float(value.detach().item() if isinstance(value, Tensor) else value)


def _call(node: LossNode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return (FUNCTIONS if node.op == "call_function" else METHODS)[node.target](*args, **kwargs)


def _filled(value: Any, run: _Run) -> Any:
    """The argument with the values of its references."""
    if isinstance(value, Ref):
        return run.values[value.node]
    if isinstance(value, Dtype):
        return _DTYPES[value.name]
    if isinstance(value, Device):
        return run.device
    if isinstance(value, tuple | list):
        return type(value)([_filled(each, run) for each in value])
    if isinstance(value, dict):
        return {name: _filled(each, run) for name, each in value.items()}
    if isinstance(value, slice):
        return slice(*(_filled(each, run) for each in (value.start, value.stop, value.step)))
    return value


_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _tensors(value: Any) -> Iterator[Tensor]:
    return (each for each in _leaves(value) if isinstance(each, Tensor))


def _has_tensors(value: Any) -> bool:
    return any(True for _ in _tensors(value))


def _is_integers(args: Sequence[Any]) -> bool:
    """Whether an index has whole numbers of at least one dimension as its only tensors, none of them in a slice."""
    kinds = all(each.dtype in (torch.int64, torch.int32) and each.dim() > 0 for each in _tensors(args))
    return kinds and not any(isinstance(each, slice) and _has_tensors(each) for each in _parts(args[0]))


def _word(node: LossNode) -> str:
    return node.target.rpartition(".")[2]


def _most(node: LossNode, args: Sequence[Any], kwargs: Mapping[str, Any], enough: int) -> int:
    """How many numbers the result has at most. Where the sizes of the arguments allow more than `enough`, or do not
    say, the exact number."""
    if node.target in MASKED and _has_tensors(args[1:]) and not _is_integers(args[1:]):
        return _most_of_masked(node, args)
    most = _most_of_sizes(node, args, [*_tensors(args), *_tensors([*kwargs.values()])])
    if most is not None and most <= enough:
        return most
    return sum(
        each.numel()
        for each in _tensors(_call(node, _on_meta(args), {name: _on_meta(each) for name, each in kwargs.items()}))
    )


def _copied(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How many numbers torch may copy for a product of batches: both arguments for all batches together."""
    given = [*_tensors(args), *_tensors([*kwargs.values()])]
    try:
        batches = math.prod(torch.broadcast_shapes(*(each.shape[:-2] for each in given)))
    except RuntimeError:
        return 0  # torch refuses them
    return sum(batches * math.prod(each.shape[-2:]) for each in given)


def _most_of_sizes(node: LossNode, args: Sequence[Any], tensors: Sequence[Tensor]) -> int | None:
    """None: the sizes of the arguments do not say. Twice as much where there are two results, as of `sort`."""
    word = _word(node)
    if word in SIZED or (node.target == "operator.getitem" and any(isinstance(each, list) for each in _parts(args[1]))):
        return None
    if not tensors:
        return 1
    if word in COMBINING:
        return max(math.prod(max(1, each.numel()) for each in tensors), sum(each.numel() for each in tensors))
    shapes = {each.shape for each in tensors if each.dim() > 0}
    if len(shapes) <= 1:
        return 2 * max(1, *(each.numel() for each in tensors))
    try:
        return 2 * math.prod(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return None


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _most_of_masked(node: LossNode, args: Sequence[Any]) -> int:
    value, index = args[0], args[1]
    if node.target != "operator.getitem":
        return math.prod(torch.broadcast_shapes(value.shape, index.shape))
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        return value.numel()
    is_number = [each.dim() == 0 and each.dtype in (torch.int64, torch.int32) for each in _tensors(index)]
    if all(is_number) and not any(isinstance(each, list) for each in _parts(index)):
        return value.numel()  # of numbers and slices
    raise TypeError("an index may be one mask, or of whole numbers and slices")


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=META)
    if isinstance(value, torch.device):
        return META
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple | list):
        mapped = [_on_meta(each) for each in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    return value
