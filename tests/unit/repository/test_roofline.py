"""The estimate of a GPU's time: what one operation costs, and that a step's parts are those of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import operations, roofline
from benchmarks.cards import CARDS
from benchmarks.cuda_attention import attention_as_on_cuda
from benchmarks.models import make_small
from benchmarks.on_meta import META, SHAPES, make_config
from benchmarks.operation_costs import Call
from benchmarks.operation_counts import Operations
from benchmarks.trainer_rows import Shape

ROW = replace(roofline.ROWS["uniform-8x128"], shape=Shape(1, 4, (0, 0), (64, 64)))


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class _Calls(Operations):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def started(self, name: str, phase: str, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        super().started(name, phase, func, args, kwargs, made)
        self.calls.append(Call(name, func, args, kwargs, made))


def _costs(run: Callable[[], Any]) -> list[tuple[str, int, int]]:
    """Name, FLOP and bytes of the operations that `run` starts."""
    with _Calls() as operations:
        run()
    return [(call.name, call.flop(), call.moved()) for call in operations.calls]


def test_products_cost_their_flop_and_each_matrix_once() -> None:
    one, other = _empty(30, 20), _empty(20, 10)
    assert _costs(lambda: torch.mm(one, other)) == [("mm", 2 * 30 * 20 * 10, 2 * (600 + 200 + 300))]
    into = _empty(30, 10)
    assert _costs(lambda: into.addmm_(one, other)) == [("addmm_", 2 * 30 * 20 * 10, 2 * (600 + 200 + 2 * 300))]
    rows, stack, ends = _empty(64, 32), _empty(3, 16, 32), _empty(3, dtype=torch.int32)
    (cost,) = _costs(lambda: functional.grouped_mm(rows, stack.transpose(1, 2), offs=ends))
    assert cost == ("_grouped_mm", 2 * 64 * 32 * 16, 2 * (64 * 32 + 3 * 16 * 32 + 64 * 16) + 3 * 4)


def test_other_operations_cost_what_they_read_and_write() -> None:
    x, bias, places = _empty(8, 100), _empty(100), _empty(5, dtype=torch.int64)
    assert _costs(lambda: x * bias) == [("mul", 0, 2 * (800 + 100 + 800))]
    assert _costs(lambda: x.mul_(bias)) == [("mul_", 0, 2 * (800 + 100 + 800))]
    assert _costs(lambda: x.float()) == [("_to_copy", 0, 2 * 800 + 4 * 800)]
    assert _costs(lambda: x.copy_(bias)) == [("copy_", 0, 2 * (100 + 800))]
    assert _costs(lambda: x.add_(bias.expand(8, 100))) == [("add_", 0, 2 * (800 + 100 + 800))]
    assert _costs(lambda: x.zero_()) == [("zero_", 0, 2 * 800)]
    assert _costs(lambda: torch.zeros_like(x)) == [("zeros_like", 0, 2 * 800)]
    assert _costs(lambda: x.index_select(0, places)) == [("index_select", 0, 2 * 2 * 500 + 5 * 8)]
    assert _costs(lambda: x.index_add_(0, places, x[:5])) == [("index_add_", 0, 3 * 2 * 500)]
    assert _costs(lambda: torch.mul(x, bias, out=_empty(8, 100))) == [("mul", 0, 2 * (800 + 100 + 800))]
    assert _costs(lambda: x.view(-1)[3:]) == []


def test_a_kernel_is_one_operation_that_reads_its_arguments_and_writes_its_results() -> None:
    def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
        return (x * rstd[:, None]).to(x.dtype) * weight, rstd

    x, weight = _empty(8, 100), _empty(100)
    with _Calls() as operations:
        operations.as_one("norm", norm)(x, weight, 1e-6)
        x.neg()
    found = [(call.name, call.flop(), call.moved()) for call in operations.calls]
    assert found == [("norm", 0, 2 * (800 + 100 + 800) + 4 * 8), ("neg", 0, 2 * 1600)]
    assert operations.totals()["other"] == 2


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_one_operation_each_way(causal: bool) -> None:
    """Each query head reads the keys of its group; backward computes the scores again: five products for two."""
    query, key, value = (_empty(2, heads, 16, 8).requires_grad_() for heads in (4, 2, 2))

    def run() -> None:
        output = functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
        torch.autograd.grad(output, [query, key, value], _empty(2, 4, 16, 8))

    with attention_as_on_cuda():
        forward, backward = _costs(run)
    of_scores = 2 * 2 * 4 * 16 * 16 * 8 // (2 if causal else 1)
    of_queries, of_keys, norms = 2 * 2 * 4 * 16 * 8, 2 * 2 * 2 * 16 * 8, 4 * 2 * 4 * 16
    assert forward == ("attention", 2 * of_scores, 2 * of_queries + 2 * of_keys + norms)
    assert backward == ("attention_backward", 5 * of_scores, 4 * of_queries + 4 * of_keys + norms)


def test_a_bound_is_the_longer_of_computing_and_moving() -> None:
    card = CARDS["H100"]
    assert card.seconds(989e12, 1, torch.bfloat16) == 1.0
    assert card.seconds(67e12, 1, torch.float32) == 1.0
    assert card.seconds(1, 3.35e12, torch.bfloat16) == 1.0


def test_a_layer_of_a_step_has_the_flop_of_the_formula() -> None:
    """4N for the frozen weights and 6N for the adapter, each token; attention as above."""
    found = roofline.estimate("0.6b", ROW, 8192, CARDS["H100"])
    sizes = SHAPES["0.6b"]
    hidden, between, queries, keys = sizes["hidden_size"], sizes["intermediate_size"], 2048, 1024
    linears = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden), *[(hidden, between)] * 3]
    weights, adapter = sum(ins * outs for ins, outs in linears), 8 * sum(ins + outs for ins, outs in linears)
    flop = {part: numbers[1] for part, numbers in found.layer.items()}
    tokens = 4 * 64
    assert (found.tokens, found.micro_batches) == (tokens, 1)
    assert flop["products"] == 4 * weights * tokens
    assert flop["adapters"] == 6 * adapter * tokens
    assert flop["attention"] == 4 * 7 * 2 * 64 * 64 * queries // 2
    total = found.total()
    assert total[0] == sum(numbers[0] for numbers in found.step.values())
    assert total[1] > sizes["num_hidden_layers"] * sum(flop.values()), "the output layer is not one of the layers"
    assert sum(found.seconds(roofline.Factors()).values()) == pytest.approx(total[3])
    card = CARDS["H100"]
    assert found.mfu(card, found.flops / card.peak(torch.bfloat16)) == pytest.approx(1.0)


def test_the_parts_of_a_step_are_all_its_operations(tmp_path: Path) -> None:
    """Two micro-batches start each operation of a layer twice."""
    row = replace(ROW, shape=Shape(1, 8, (0, 0), (64, 64)))
    path = make_config(tmp_path, "0.6b", 2)
    whole, halves = (roofline.work_of(path, row, rows, CARDS["H100"]) for rows in (512, 256))
    for work in (whole, halves):
        totals = work.totals()
        counted = sum(totals[phase] for phase in ("pass", "optimizer"))
        assert sum(numbers[0] for numbers in work.parts.values()) == counted
    assert (whole.micro_batches, halves.micro_batches) == (1, 2)
    assert halves.parts["products"][0] == 2 * whole.parts["products"][0]
    assert halves.parts["products"][1] == whole.parts["products"][1]
    assert halves.parts["products"][2] > whole.parts["products"][2], "the weights are read twice"


def test_kernels_between_the_products_and_of_logprobs_change_nothing_else(tmp_path: Path) -> None:
    path = make_config(tmp_path, "0.6b", 2)
    plain, kernels = (roofline.work_of(path, ROW, 8192, CARDS["H100"], each) for each in ("now", "kernels"))
    for part in ("products", "adapters", "attention", "optimizer"):
        assert kernels.parts[part].tolist() == plain.parts[part].tolist(), part
    for part in ("between", "logits"):
        assert kernels.parts[part][0] < plain.parts[part][0], part
        assert kernels.parts[part][2] < plain.parts[part][2], part
    names = {name for counts in kernels.counts.values() for name in counts}
    assert {"rms_norm", "add_rms_norm", "rotated", "rotated_backward", "swiglu", "swiglu_backward"} <= names
    assert {"norms_of", "into_gradient"} <= names


def test_a_kernel_adds_the_products_of_stacked_adapters(tmp_path: Path) -> None:
    """Of layers and of the output layer: the FLOP stay, and no sum is an operation of its own any more."""
    path = make_config(tmp_path, "0.6b", 2)
    row = replace(ROW, ranks=(8, 8))
    plain, kernels = (roofline.work_of(path, row, 8192, CARDS["H100"], each) for each in ("now", "kernels"))
    alone = roofline.work_of(path, ROW, 8192, CARDS["H100"], "kernels")
    assert kernels.parts["adapters"][1] == plain.parts["adapters"][1] > 0
    of_layers = 2 * (7 + 4)  # forward, and backward but to the first layer's input
    assert kernels.counts["pass"]["add_grouped"] == of_layers - 1 + 2
    assert kernels.parts["adapters"][5] > 0
    assert kernels.parts["logits"][5] > 0
    assert plain.counts["pass"]["add_"] > kernels.counts["pass"]["add_"] == alone.counts["pass"]["add_"]


def test_graphs_leave_the_host_little_and_the_gpu_its_work(tmp_path: Path) -> None:
    """Each layer has four graphs. Their results are copied to fixed places."""
    path = make_config(tmp_path, "0.6b", 2)
    plain, graphs = (roofline.work_of(path, ROW, 8192, CARDS["H100"], each) for each in ("now", "graphs"))
    for part in ("products", "adapters", "attention"):
        assert graphs.parts[part][:6].tolist() == pytest.approx(plain.parts[part][:6].tolist()), part
    assert plain.parts["between"][-1] == plain.parts["between"][0] < graphs.parts["between"][0]
    assert graphs.parts["between"][-1] < plain.parts["between"][-1]
    assert graphs.parts["products"][-1] == 0


@pytest.mark.parametrize(("prompt", "copies"), [(0, 0), (64, 4 * 64)])
def test_attention_in_sequences_counts_the_pairs_that_it_computes(prompt: int, copies: int, tmp_path: Path) -> None:
    """Of each answer's tokens with those before them; of the prompt once, though its keys are copied."""
    row = replace(ROW, shape=Shape(1, 4, (prompt, prompt), (33, 33)))
    path = make_config(tmp_path, "0.6b", 2)
    plain, varlen = (roofline.work_of(path, row, 8192, CARDS["H100"], each) for each in ("now", "varlen"))
    last = 33 - (prompt > 0)  # the last token of an answer is a target alone
    pairs = prompt * (prompt + 1) // 2 + 4 * (last * prompt + last * (last + 1) // 2)
    assert varlen.parts["attention"][:2].tolist() == [4, 2 * 7 * 2 * pairs * 16 * 128]
    assert varlen.totals()["pass"] < plain.totals()["pass"]


def test_pefts_loop_starts_the_operations_of_a_layer_that_it_starts_on_a_cpu(tmp_path: Path) -> None:
    """Where torch itself casts for autocast."""
    row = next(each for each in operations.ROWS if each.name == "uniform")
    layers = 2, 4
    small = [make_small(tmp_path / f"small-{each}", each) for each in layers]
    two, four = (
        roofline.work_of(make_config(tmp_path / str(each), "0.6b", each), row, 8192, CARDS["H100"], "peft")
        for each in layers
    )
    assert two.micro_batches == 1
    counted = (four.totals()["pass"] - two.totals()["pass"]) / 2
    assert counted == operations.counts(small, row, "peft").of_layer


def test_a_batch_with_padding_costs_pefts_loop_its_padding(tmp_path: Path) -> None:
    """And a mask, with which attention reads no shared heads and computes all pairs."""
    path = make_config(tmp_path, "0.6b", 2)
    row = replace(ROW, shape=Shape(1, 2, (20, 20), (10, 20)))
    longest = max(len(datum.tokens) for datum in row.passes(100)[0].data)
    work = roofline.work_of(path, row, 8192, CARDS["H100"], "peft")
    assert work.parts["attention"][:2].tolist() == [4, 2 * 7 * 2 * 2 * longest**2 * 16 * 128]


def test_measured_times_give_the_factors_of_kernels() -> None:
    """Both sums of the run on an H100 come out again; a short pass takes as long as its small kernels."""
    bound, measured = roofline.BOUND, roofline.MEASURED
    long = np.array([0, 0, 0, bound["all"], bound["products"], 0, 0])
    short = np.array([bound["operations_of_short"], 0, 0, bound["short"], 0, 0, 0])
    assert roofline.H100.seconds(long) == pytest.approx(measured["all"])
    assert roofline.H100.seconds(short) == pytest.approx(measured["short"])
    assert 1 < roofline.H100.products < roofline.H100.others, "no kernel beats its bound"
    assert "measured 188 (2.15 times)" in roofline.said()
