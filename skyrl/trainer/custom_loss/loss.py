"""A custom loss as a loss of a pass: sequence by sequence, on the host, with its gradient at once.

The SDK's client computes such a loss for each datum and adds the losses up, so a micro-batch can compute those of its
sequences. On the host the gradient has the same bits as the client's. Knows no operation of a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.base.types.custom_loss import CustomLoss
from skyrl.trainer.custom_loss.graph import META, LossGraph, LossOutput, Work
from skyrl.trainer.losses import Loss, LossInputs, LossValue
from skyrl.trainer.protocol import Datum, InvalidRequest, TrainingPass
from skyrl.trainer.rows.pictures import text_targets

CUSTOM = "custom"
CHECKED = 2
"""How many different shapes of a pass are tried before it runs. One takes some milliseconds."""
METRIC = "custom/"
"""How the names of a custom loss's metrics begin."""


def with_custom(losses: Mapping[str, Loss], training_pass: TrainingPass) -> Mapping[str, Loss]:
    """The losses by name that the pass may have: with its custom loss, if it has one."""
    if training_pass.custom_loss is None:
        return losses
    checks = _Checks(LossGraph(training_pass.custom_loss))
    return {**losses, CUSTOM: Loss(DatumLosses(checks.graph), per_target=True, check_inputs=checks.check)}


def loss_of(training_pass: TrainingPass, losses: Mapping[str, Loss]) -> Loss:
    """The loss of a checked pass."""
    return with_custom(losses, training_pass)[training_pass.loss_fn].of(training_pass.data)


class _Checks:
    """Checks of the data of one pass: of each its inputs, and of some the whole graph. What the others have wrong fails
    the pass when their loss is computed."""

    def __init__(self, graph: LossGraph) -> None:
        self.graph = graph
        self._checked: set[object] = set()

    def check(self, datum: Datum) -> None:
        loss = self.graph.loss
        for given in loss.inputs:
            name = "target_tokens" if given.name == "logprobs" else given.name
            values = datum.loss_inputs.get(name)
            if values is None:
                raise InvalidRequest(f"loss_fn_inputs.{name}: missing; the custom loss {loss.name!r} takes it")
            if _shaped(values, given.rank).ndim != given.rank:
                raise InvalidRequest(
                    f"loss_fn_inputs.{name}: has {values.ndim} dimensions, and the custom loss {loss.name!r} was "
                    f"created for {given.rank} of {given.name}"
                )
        inputs = _inputs(loss, datum, torch.zeros(datum.loss_inputs["target_tokens"].shape))
        kinds = tuple((each.shape, each.dtype) for each in inputs)
        if len(self._checked) < CHECKED and kinds not in self._checked:
            self._checked.add(kinds)
            self.graph.check([torch.empty(shape, dtype=dtype, device=META) for shape, dtype in kinds])


def _shaped(values: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
    """A scalar has no shape on the wire, and was read as a vector of one number."""
    return values.reshape(()) if rank == 0 and values.shape == (1,) else values


def _inputs(loss: CustomLoss, datum: Datum, logprobs: Tensor) -> list[Tensor]:
    others = (_shaped(datum.loss_inputs[given.name], given.rank) for given in loss.inputs[1:])
    return [logprobs, *(torch.from_numpy(np.array(each)) for each in others)]


class _WithGradient(torch.autograd.Function):
    """Values whose sum has a gradient that was computed before."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, values: Tensor, gradient: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gradient)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return upstream * gradient, None, None


@dataclass(frozen=True, eq=False)
class DatumLosses:
    """A custom loss as a `LossFunction`. `data`: the sequences whose logprobs it gets, with their indices in the
    pass."""

    graph: LossGraph
    data: Sequence[tuple[int, Datum]] = ()

    def of(self, parts: Sequence[tuple[Sequence[int], Sequence[Datum]]]) -> DatumLosses:
        """The same loss, of the sequences of some parts: of each its indices and its data."""
        return replace(self, data=[each for part in parts for each in zip(*part, strict=True)])

    def __call__(self, logprobs: Tensor, inputs: LossInputs, config: Mapping[str, float]) -> LossValue:
        """Each sequence's loss and metrics stand at its first entry; the other entries are 0. Raises InvalidRequest."""
        backward = logprobs.requires_grad
        host = logprobs.detach().cpu()
        terms, gradient = torch.zeros_like(host), torch.zeros_like(host)
        metrics: dict[str, Tensor] = {}
        work, start = Work(), 0
        for index, datum in self.data:
            stop = start + datum.loss_inputs["target_tokens"].size
            try:
                output = self._of_datum(datum, host[start:stop], work, backward=backward)
            except InvalidRequest as error:
                raise InvalidRequest(f"data[{index}]: {error}") from error
            terms[start] = output.loss
            for name, value in output.metrics.items():
                values = metrics.setdefault(name, torch.zeros(len(host), dtype=torch.float64))
                values[start] = value
            if output.gradient is not None:
                gradient[start:stop] = output.gradient.reshape(-1)
            start = stop
        device = logprobs.device
        terms, gradient = terms.to(device), gradient.to(device)
        if backward:
            terms = _WithGradient.apply(logprobs, terms, gradient)
        return LossValue(terms, metrics={name: values.to(device) for name, values in metrics.items()})

    def _of_datum(self, datum: Datum, logprobs: Tensor, work: Work, *, backward: bool) -> LossOutput:
        given = logprobs.reshape(datum.loss_inputs["target_tokens"].shape)
        output = self.graph.evaluate(_inputs(self.graph.loss, datum, given), work, backward=backward)
        if output.gradient is not None and datum.pictures:
            trained = (output.gradient.reshape(len(given), -1) != 0).any(dim=1).numpy()
            if (asked := trained & ~text_targets(datum)).any():
                raise self.graph.refusal(
                    f"has a gradient at position {int(asked.argmax())}, whose target is a token of a picture: pictures "
                    "are never trained on"
                )
        return output


def custom_sums(value: LossValue, part_of_entry: Tensor | None, parts: int) -> Tensor:
    """The sums of the loss and of each metric over the entries of each part: float64, flat."""
    columns = torch.stack([value.terms.detach().double(), *value.metrics.values()])
    if part_of_entry is None:
        return columns.sum(dim=1)
    return columns.new_zeros(len(columns), parts).index_add_(1, part_of_entry, columns).view(-1)
