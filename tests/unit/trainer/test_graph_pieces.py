"""Pieces of a layer as graphs, emulated on the CPU: the bits of the plain functions with other contents, who owns
results, and what happens when a capture fails.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from skyrl.trainer.graphs.pieces import VARIANTS, Graphs, Piece, Results
from skyrl.trainer.graphs.recorder import Compute
from skyrl.trainer.graphs.row_classes import RowClasses
from skyrl.trainer.kernels import between
from tests.graph_emulator import EmulatedGraphs, Refused, run_without_values
from tests.graphed_layers import Layers, backward, forward, plainly

HEADS, SIZE, HIDDEN = 3, 8, 24
CPU = torch.device("cpu")
CLASSES = RowClasses((8, 16))


def graphs_of(recorder: Any = None, **options: Any) -> Graphs:
    options = {"most_bytes": 1e9, "warm_up": 0} | options
    return Graphs(recorder or EmulatedGraphs(), options.pop("classes", CLASSES), CPU, **options)


def graphed(graphs: Graphs, layers: Layers, leaves: Sequence[Tensor], batch: Sequence[Tensor]) -> list[Tensor]:
    return [each.clone() for each in layers.graphed(graphs, leaves, batch)]


def padded(batch: Sequence[Tensor], size: int) -> list[Tensor]:
    return [torch.cat([each, each.new_zeros(size - len(each), *each.shape[1:])]) for each in batch]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_give_the_bits_of_the_plain_functions_on_padded_rows(dtype: torch.dtype) -> None:
    """With other rows, contents and adapters each time. The emulator also compares each operation with that of the
    capture, and each result with the function's."""
    layers, graphs = Layers(dtype), graphs_of()
    for seed, rows in enumerate((8, 5, 16, 3, 8, 11, 16, 9)):
        leaves, batch = layers.adapter(seed % 3), layers.batch(rows, seed)
        found = graphed(graphs, layers, leaves, batch)
        size = CLASSES.of(rows)
        assert size is not None
        expected = layers.whole(plainly, leaves, padded(batch, size))
        assert same(found, [expected[0][:rows], expected[1][:rows], *expected[2:]])
    counts = graphs.counts
    # the class of 16 rows comes third: then all graphs are captured again
    assert (counts.captured, counts.dropped, counts.replayed) == (3 * 4, 4, 8 * 4)
    assert (counts.rows, counts.padded) == (76, 3 + 5 + 5 + 7)


def test_padding_changes_gradients_by_rounding_alone() -> None:
    layers, graphs = Layers(), graphs_of()
    leaves, batch = layers.adapter(0), layers.batch(9, 0)
    torch.testing.assert_close(graphed(graphs, layers, leaves, batch), layers.whole(plainly, leaves, batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_rows_stay_zeros_and_finite_and_add_nothing(dtype: torch.dtype) -> None:
    """rstd of a row of zeros is 1 / sqrt(eps), finite; its cube is finite, too, so no gradient becomes 0 * inf."""
    layers = Layers(dtype)
    leaves, batch = layers.adapter(0), padded(layers.batch(5, 0), 16)
    result, kept = layers.forwards(plainly, leaves, batch)
    assert not result[5:].any()
    for _, own in kept:
        assert all(each.isfinite().all() for each in own)
    of_hidden, *of_matrices = layers.backwards(plainly, kept, batch)
    assert not of_hidden[5:].any()
    exact = Layers()
    own_leaves, own_batch = [[each.float() for each in given] for given in (leaves, layers.batch(5, 0))]
    exact.frozen = [[each.float() for each in of_layer] for of_layer in layers.frozen]
    _, _, *expected = exact.whole(plainly, own_leaves, own_batch)
    for found, other in zip(of_matrices, expected, strict=True):
        assert (found - other).norm() < (0.02 if dtype is torch.bfloat16 else 1e-5) * other.norm()


@pytest.mark.parametrize("epsilon", [1e-5, 1e-6, 1e-12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_gates_of_zeros_are_zeros(epsilon: float, dtype: torch.dtype) -> None:
    zeros, weight = torch.zeros(2, HEADS, SIZE, dtype=dtype), torch.full((SIZE,), 1.5, dtype=dtype)
    cos = sin = torch.zeros(2, SIZE, dtype=dtype)
    rows, rstd = between.rms_norm(zeros, weight, epsilon)
    turned, rstd_of_heads = between.rotated(zeros, weight, epsilon, cos, sin)
    assert rstd.pow(3).isfinite().all()
    found = [
        rows,
        turned,
        between.rms_norm_backward(zeros.clone(), zeros, weight, rstd, zeros),
        between.rotated_backward(zeros, zeros, weight, rstd_of_heads, cos, sin),
        between.swiglu(zeros, zeros),
        *between.swiglu_backward(zeros.clone(), zeros, zeros),
    ]
    assert not any(each.any() for each in found)


def test_adapters_with_the_same_ranks_replay_the_same_graphs() -> None:
    layers, graphs = Layers(), graphs_of(most_signatures=2, recent=0)
    for seed in range(3):
        graphed(graphs, layers, layers.adapter(seed), layers.batch(8, seed))
    assert graphs.counts.captured == 4
    graphed(graphs, layers, layers.adapter(0, rank=2), layers.batch(8, 0))
    assert graphs.counts.captured == 8
    graphed(graphs, layers, layers.adapter(0), layers.batch(8, 0))
    assert (graphs.counts.captured, graphs.counts.dropped) == (8, 0)
    graphed(graphs, layers, layers.adapter(0, rank=3), layers.batch(8, 0))
    assert graphs.counts.dropped == 4, "the graphs of rank 2 are the least recently used ones"
    graphed(graphs, layers, layers.adapter(0), layers.batch(8, 0))
    assert graphs.counts.captured == 12


def test_ranks_that_take_turns_are_not_captured_again_and_again() -> None:
    layers, graphs = Layers(), graphs_of(most_signatures=2, recent=4)
    adapters = [layers.adapter(0, rank) for rank in (2, 3, 4)]
    found = [graphs.micro_batch(8, adapters[number % 3]) is not None for number in range(12)]
    assert found == [True, True, False] * 4
    assert graphs.counts.dropped == 0
    later = [graphs.micro_batch(8, adapters[2]) is not None for _ in range(5)]
    assert later == [False, False, True, True, True], "rank 2 was last used five micro-batches before the third"


def test_each_scale_has_its_own_graph() -> None:
    layers, graphs = Layers(), graphs_of()
    leaves, batch = layers.adapter(0), layers.batch(8, 0)
    for scale in (0.5, 2.0, 0.5):
        micro_batch = graphs.micro_batch(8, leaves)
        assert micro_batch is not None
        result, _ = layers.forwards(micro_batch.run, micro_batch.leaves, batch, scale)
        assert torch.equal(result, layers.forwards(plainly, leaves, batch, scale)[0])
    assert graphs.counts.captured == 4


def test_numbers_that_change_each_time_capture_a_few_graphs_and_no_more() -> None:
    layers, graphs = Layers(), graphs_of()
    leaves, batch = layers.adapter(0), layers.batch(7, 0)
    for number in range(VARIANTS + 3):
        micro_batch = graphs.micro_batch(7, leaves, of_rows=batch[1:3])
        assert micro_batch is not None
        given, scale = [batch[0], *micro_batch.of_rows, batch[3]], 1.0 + number
        found = layers.whole(micro_batch.run, micro_batch.leaves, given, scale)
        torch.testing.assert_close(found, layers.whole(plainly, leaves, batch, scale))
    assert graphs.counts.captured == 4 * VARIANTS


def stacked(numbers: Any, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
    """Adapters' low-rank rows, and the gradient of lora_A from low-rank rows."""
    lora_a, ends = fixed
    (x,) = of_rows
    low_rank = grouped_mm(x, lora_a.transpose(1, 2), offs=ends)
    return Results((low_rank,), (grouped_mm(low_rank.t(), x, offs=ends),))


def test_padded_rows_are_the_last_stacked_adapters() -> None:
    """Rows beyond the last end would have no group: their results would be whatever lies in memory."""
    graphs, piece = graphs_of(), Piece("stacked", stacked)
    for ends, rows in (([3, 8], 8), ([6, 13], 13), ([2, 11], 11)):
        torch.manual_seed(rows)
        x, lora_a = torch.randn(rows, 16).bfloat16(), torch.randn(2, 8, 16).bfloat16()
        own = torch.tensor(ends, dtype=torch.int32)
        micro_batch = graphs.micro_batch(rows, [lora_a], own)
        assert micro_batch is not None
        assert micro_batch.ends is not None
        found = micro_batch.run(piece, None, [*micro_batch.leaves, micro_batch.ends], [x])
        torch.testing.assert_close(found, piece.compute(None, [lora_a, own], [x]))
    assert graphs.counts.captured == 2


def test_a_row_that_is_not_finite_in_one_class_reaches_no_later_micro_batch() -> None:
    layers, graphs = Layers(), graphs_of()
    leaves, batch = layers.adapter(0), layers.batch(16, 0)
    broken = [each.clone() for each in batch]
    broken[0][12:], broken[3][12:], broken[1][12:] = torch.nan, torch.inf, torch.nan
    assert not graphed(graphs, layers, leaves, broken)[0].isfinite().all()
    for rows in (10, 5):
        own = [each[:rows] for each in batch]
        found = graphed(graphs, layers, leaves, own)
        torch.testing.assert_close(found, layers.whole(plainly, leaves, own))


def test_what_a_forward_keeps_is_there_until_its_backward() -> None:
    """Forward of both layers, backward of both; then again after a micro-batch that failed between the two."""
    layers, graphs = Layers(), graphs_of()
    leaves = layers.adapter(0)
    abandoned, batch = layers.batch(13, 1), layers.batch(13, 2)
    for _ in range(2):
        micro_batch = graphs.micro_batch(13, leaves)
        assert micro_batch is not None
        layers.forwards(micro_batch.run, micro_batch.leaves, abandoned)
        torch.testing.assert_close(graphed(graphs, layers, leaves, batch), layers.whole(plainly, leaves, batch))


def test_a_backward_after_the_next_micro_batch_has_begun_is_an_error() -> None:
    layers, graphs = Layers(), graphs_of()
    leaves, batch = layers.adapter(0), layers.batch(8, 0)
    first = graphs.micro_batch(8, leaves)
    assert first is not None
    _, kept = layers.forwards(first.run, first.leaves, batch)
    graphs.micro_batch(8, leaves)
    with pytest.raises(RuntimeError, match="its backward is too late"):
        layers.backwards(first.run, kept, batch)


def test_a_result_of_an_earlier_class_is_not_taken_where_it_lies() -> None:
    """The rows after it are those of the other class, and not this micro-batch's padding."""
    layers, graphs = Layers(), graphs_of()
    leaves = layers.adapter(0)
    first = graphs.micro_batch(16, leaves)
    assert first is not None
    result, _ = layers.forwards(first.run, first.leaves, layers.batch(16, 0))
    kept = result[:5].clone()
    second = graphs.micro_batch(5, leaves)
    assert second is not None
    batch = [result[:5], *layers.batch(5, 1)[1:]]
    found = layers.whole(second.run, second.leaves, batch)
    torch.testing.assert_close(found, layers.whole(plainly, leaves, [kept, *batch[1:]]))


def test_pieces_of_all_layers_may_share_the_memory_of_their_results() -> None:
    layers, graphs = Layers(), graphs_of()
    graphed(graphs, layers, layers.adapter(0), layers.batch(16, 0))
    apart = Layers()
    apart.backward = [Piece(piece.name, piece.compute) for piece in apart.backward]
    more = graphs_of()
    graphed(more, apart, layers.adapter(0), layers.batch(16, 0))
    assert more.places.held_bytes - graphs.places.held_bytes == 16 * HIDDEN * 4


def test_classes_share_their_memory() -> None:
    layers, one, both = Layers(), graphs_of(), graphs_of()
    for rows in (16, 5, 16, 8):
        graphed(both, layers, layers.adapter(0), layers.batch(rows, rows))
    graphed(one, layers, layers.adapter(0), layers.batch(16, 0))
    assert both.held_bytes == one.held_bytes
    assert both.counts.captured == 2 * one.counts.captured
    assert both.places.held_bytes > 16 * 4 * 2 * (3 * HIDDEN + 2 * 40 + 4 + 2)  # what two layers keep, float32


class Refusing(EmulatedGraphs):
    """Raises an error at the third capture."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.captures = error, 0

    def capture(self, compute: Compute, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Callable[[], None]:
        self.captures += 1
        if self.captures == 3:
            raise self.error
        return super().capture(compute, reads, writes)


def test_without_a_capture_everything_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    layers, graphs = Layers(), graphs_of(recorder := Refusing(RuntimeError("operation not permitted when capturing")))
    leaves, batch = layers.adapter(0), layers.batch(7, 0)
    with caplog.at_level(logging.WARNING):
        found = graphed(graphs, layers, leaves, batch)
        assert graphs.micro_batch(7, leaves) is None
    torch.testing.assert_close(found, layers.whole(plainly, leaves, batch))
    (record,) = caplog.records
    assert "without CUDA graphs from now on: RuntimeError: operation not permitted" in record.message
    assert (recorder.captures, graphs.held_bytes, graphs.counts.dropped) == (3, 0, 2)


def test_without_memory_for_a_class_smaller_ones_have_graphs() -> None:
    layers, graphs = Layers(), graphs_of(Refusing(torch.OutOfMemoryError("no memory")))
    leaves = layers.adapter(0)
    large, small = layers.batch(16, 0), layers.batch(6, 1)
    torch.testing.assert_close(graphed(graphs, layers, leaves, large), layers.whole(plainly, leaves, large))
    assert graphs.micro_batch(16, leaves) is None
    assert graphs.held_bytes == 0
    torch.testing.assert_close(graphed(graphs, layers, leaves, small), layers.whole(plainly, leaves, small))
    assert graphs.counts.captured == 2 + 4


def test_the_memory_of_graphs_is_bounded() -> None:
    layers, small = Layers(), graphs_of()
    leaves = layers.adapter(0)
    graphed(small, layers, leaves, layers.batch(8, 0))
    graphs = graphs_of(most_bytes=small.held_bytes)
    graphed(graphs, layers, leaves, layers.batch(8, 0))
    large = layers.batch(12, 0)
    torch.testing.assert_close(graphed(graphs, layers, leaves, large), layers.whole(plainly, leaves, large))
    assert graphs.micro_batch(12, leaves) is None
    graphed(graphs, layers, leaves, layers.batch(8, 0))
    assert 0 < graphs.held_bytes <= small.held_bytes


def test_rows_and_ranks_that_come_once_are_not_captured() -> None:
    layers, graphs = Layers(), graphs_of(warm_up=1)
    for rank in range(1, 40):
        assert graphs.micro_batch(8, layers.adapter(0, rank)) is None
    assert graphs.held_bytes == 0
    assert graphs.micro_batch(8, layers.adapter(0, 7)) is not None
    assert graphs.micro_batch(17, layers.adapter(0, 7)) is None
    assert graphs.micro_batch(17, layers.adapter(0, 7)) is None, "no class has so many rows"
    assert graphs.counts.plain == 41


BAKED = {"number": 2.0, "tensor": torch.ones(HIDDEN), "times": 1}


def _number(x: Tensor) -> Tensor:
    return x * BAKED["number"]


def _tensor(x: Tensor) -> Tensor:
    return x * BAKED["tensor"]


def _times(x: Tensor) -> Tensor:
    for _ in range(BAKED["times"]):
        x = x + 1
    return x


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "asks for a value": (lambda x: x * x.sum().item(), "local_scalar_dense"),
    "asks for a list": (lambda x: x * x[0].tolist()[0], "no data"),
    "branches on a value": (lambda x: x if x.sum() > 0 else -x, "is_nonzero|local_scalar_dense"),
    "asks for NumPy": (lambda x: x + x.numpy().sum(), "numpy"),
    "counts": (lambda x: x + len(x.nonzero()), "nonzero"),
    "takes a mask": (lambda x: x + x[x > 0].sum(), "index"),
    "uploads": (lambda x: x + torch.tensor([1.0] * HIDDEN), "host|devices"),
    "uploads to the device": (lambda x: x + torch.tensor([1.0] * HIDDEN, device=x.device), "host"),
    "downloads": (lambda x: x.cpu() + 1, "no data"),
    "reads a tensor from elsewhere": (_tensor, "Tensor on device cpu"),
    "changes its input": (lambda x: x.add_(1), "changes an input"),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_function_that_cannot_be_a_graph_is_refused(how: str, caplog: pytest.LogCaptureFixture) -> None:
    function, message = WRONG[how]
    graphs = graphs_of()
    piece = Piece(how, lambda numbers, fixed, of_rows: Results((function(of_rows[0]),)))
    micro_batch = graphs.micro_batch(6)
    assert micro_batch is not None
    micro_batch.run(piece, None, (), [torch.randn(6, HIDDEN)])
    assert graphs.counts.captured == 0
    (record,) = caplog.records
    assert re.search(message, record.message), record.message


@pytest.mark.parametrize(
    ("function", "change"), [(_number, {"number": 3.0}), (_times, {"times": 2})], ids=["number", "operations"]
)
def test_a_number_that_changes_after_the_capture_is_found(
    function: Callable[[Tensor], Tensor], change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, x = graphs_of(), torch.randn(8, HIDDEN)
    piece = Piece("baked", lambda numbers, fixed, of_rows: Results((function(of_rows[0]),)))
    micro_batch = graphs.micro_batch(8)
    assert micro_batch is not None
    for _ in range(2):
        micro_batch.run(piece, None, (), [x])
    for name, value in change.items():
        monkeypatch.setitem(BAKED, name, value)
    with pytest.raises(Refused, match="since the capture|captured, and now"):
        micro_batch.run(piece, None, (), [x])


def test_a_fixed_tensor_elsewhere_is_another_graph() -> None:
    graphs, x = graphs_of(), torch.randn(8, HIDDEN)
    piece = Piece("product", lambda numbers, fixed, of_rows: Results((of_rows[0] * fixed[0],)))
    weights = [torch.full((HIDDEN,), 2.0), torch.full((HIDDEN,), 3.0)]
    for weight in (*weights, *weights):
        micro_batch = graphs.micro_batch(8)
        assert micro_batch is not None
        assert torch.equal(micro_batch.run(piece, None, [weight], [x]).of_rows[0], x * weight)
    assert graphs.counts.captured == 2


def test_the_pieces_ask_for_no_values() -> None:
    """No function of `kernels.between` asks the device for a value, or has a tensor on the host."""
    layers = Layers(torch.bfloat16)
    hidden, cos, sin, gradient = layers.batch(8, 0)
    fixed = [*layers.frozen[0], *layers.adapter(0)[:2]]
    count = len(fixed)
    of_forward = forward(0.5, fixed, (hidden, cos, sin))
    given = (gradient, *of_forward.of_rows[1:], cos, sin)
    for compute, of_rows in ((forward, (hidden, cos, sin)), (backward, given)):
        run_without_values(partial(_called, compute, count), [*fixed, *of_rows], [])


def _called(compute: Any, count: int, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    compute(0.5, reads[:count], reads[count:])
