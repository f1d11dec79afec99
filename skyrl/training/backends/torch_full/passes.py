"""One slice of a pass on the model in training: its loss, and its gradient added to that of the pass.

How a pass is cut, what is recorded of it, and how it fails are those of adapters (`torch_lora.passes`).
"""

from __future__ import annotations

import torch

from skyrl.training.backends.base import OutOfMemory
from skyrl.training.backends.torch_full.model import FullModel
from skyrl.training.backends.torch_full.parameters import FullParameters
from skyrl.training.backends.torch_lora.device import failure_of
from skyrl.training.backends.torch_lora.passes import MicroBatch, SliceResult, look_at, record_or_fail
from skyrl.training.backends.torch_lora.running import Slice
from skyrl.training.backends.torch_lora.scores import GroupSums, Scores


def run_slice(model: FullModel, parameters: FullParameters, piece: Slice, *, backward: bool) -> None:
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


def _forward_backward(model: FullModel, parameters: FullParameters, piece: Slice, backward: bool) -> SliceResult:
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
    return SliceResult(Scores(logprobs, [sums], None).read(), None)
