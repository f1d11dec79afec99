"""Gradients of a chunk's rows that are computed with its logprobs: the same as those of a backward that computes the
logits again, with two products of the vocabulary instead of three."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_lora_support import VOCAB, base_path, grpo, make_backend, ok, overflowing, rl, sft, spec, train, with_returns

from skyrl.base.pictures.picture import PlacedPicture
from skyrl.trainer.lora.linear import ActiveSegments, LoraSegment, MultiLoraLinear
from skyrl.trainer.losses import LOSSES, LossInputs, LossValue, ppo
from skyrl.trainer.model import logprobs as logprobs_module
from skyrl.trainer.model.logprobs import LogitTransform, OutputLayer, PairGradients, Targets, target_logprobs
from skyrl.trainer.passes.entry_gradients import pair_gradients
from skyrl.trainer.passes.micro_batch import MicroBatchLosses, losses_of, trained_entries
from skyrl.trainer.passes.pass_run import MicroBatchItem, SinglePassRun
from skyrl.trainer.passes.scores import Scores
from skyrl.trainer.protocol import Datum, TrainingPass
from skyrl.trainer.ranks import lora_rank
from tests.families import make_family
from tests.local_ranks import rank_of

CPU = torch.device("cpu")
BY_ENTRY = [name for name, loss in LOSSES.items() if loss.by_entry]
ROWS_OF_A_CHUNK = 16


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", ROWS_OF_A_CHUNK * VOCAB * 4)


def _with_masks(data: Sequence[Datum]) -> list[Datum]:
    """For gspo."""
    for datum in data:
        datum.loss_inputs["sequence_ratio_mask"] = (datum.loss_inputs["advantages"] != 0).astype(np.float32)
    return [*data]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_marked_if_no_other_logprob_changes_an_entrys_gradient(name: str) -> None:
    loss, generator = LOSSES[name], torch.Generator().manual_seed(0)
    names = (*loss.required, *loss.optional)
    inputs = LossInputs(
        {each: torch.randn(40, generator=generator) for each in names}, torch.zeros(40, dtype=torch.int64), 1
    )
    logprobs = torch.randn(40, generator=generator)

    def gradient(at: Tensor) -> Tensor:
        leaf = at.clone().requires_grad_()
        return torch.autograd.grad(loss.function(leaf, inputs, loss.config).total, leaf)[0]

    changed = logprobs + torch.where(torch.arange(40) < 20, 0, 0.5)
    assert torch.equal(gradient(logprobs)[:20], gradient(changed)[:20]) == loss.by_entry


def _item(data: Sequence[Datum], loss_fn: str, model: Any) -> MicroBatchItem:
    training_pass = TrainingPass("m", data, loss_fn)
    return MicroBatchItem(SinglePassRun(model, training_pass, LOSSES[loss_fn].of(data)), range(len(data)), 1)


def _model() -> Any:
    backend = make_backend()
    backend.create_model("m", spec())
    return rank_of(backend).adapters["m"]


def _targets(items: Sequence[MicroBatchItem]) -> Targets:
    """Of the items, whose sequences share no rows."""
    data = [datum for item in items for part in item.parts for datum in part.data]
    stops = np.cumsum([len(datum.tokens) for datum in data])
    rows_of = [np.arange(stop - len(datum.tokens), stop) for datum, stop in zip(data, stops, strict=True)]
    trained = np.concatenate([trained_entries(part) for item in items for part in item.parts])
    return Targets.of([datum.loss_inputs["target_tokens"] for datum in data], rows_of, trained, CPU)


@pytest.mark.parametrize("joined", [False, True])
def test_gradients_of_some_pairs_have_the_bits_of_the_scores(joined: bool) -> None:
    """Kinds take turns: so some groups begin before the parts and end after them."""
    model = _model()
    two = sft(5, 6)
    two[0].loss_inputs.update(target_tokens=np.arange(12).reshape(6, 2) % 10, weights=np.arange(12.0).reshape(6, 2))
    items = [_item(rl(number, 11, 7), name, model) for number, name in enumerate(BY_ENTRY[1:])]
    items += [
        _item(sft(1, 9), "cross_entropy", model),
        _item(rl(2, 12), "ppo", model),
        _item(two, "cross_entropy", model),
    ]
    items += [_item(rl(3, 10, 4), "ppo", model), _item(rl(4, 3), "dro", model)]
    losses = losses_of(items, CPU, joined=joined)
    for numbers in (range(len(items)), range(2, 4), range(6, 9), range(9, 10)):
        targets = _targets(items[numbers.start : numbers.stop])
        first = sum(part.entries for item in items[: numbers.start] for part in item.parts)
        of_pairs = -3 + torch.randn(int(targets.entries.max()) + 1, generator=torch.Generator().manual_seed(1))
        logprobs = torch.zeros(sum(part.entries for item in items for part in item.parts))
        own = slice(first, first + len(targets.entries))
        logprobs[own] = targets.of_entries(of_pairs)
        scores = Scores.of(losses, logprobs, backward=True)
        gradients = pair_gradients(losses, numbers, targets)
        assert scores.gradient is not None
        assert gradients is not None
        expected = torch.zeros_like(of_pairs).index_add_(0, targets.entries, scores.gradient[own])
        trained = len(targets.trained.ids)
        for size in (trained, 5):
            chunks = [slice(start, min(start + size, trained)) for start in range(0, trained, size)]
            found = torch.cat([gradients(of_pairs[chunk], chunk) for chunk in chunks])
            assert torch.equal(found, expected[:trained])


def test_gradients_are_not_known_at_once_where_they_may_change_or_need_other_logprobs() -> None:
    model = _model()
    gspo, ppo = _item(_with_masks(rl(0, 9)), "gspo", model), _item(rl(1, 9), "ppo", model)
    seeing = [replace(datum, pictures=(PlacedPicture(3, 3, "0" * 64, "png"),)) for datum in rl(2, 9)]
    items = [gspo, ppo, _item(seeing, "ppo", model)]
    losses = losses_of(items, CPU, joined=False)

    def known(losses: MicroBatchLosses, start: int, stop: int) -> bool:
        return pair_gradients(losses, range(start, stop), _targets(items[start:stop])) is not None

    assert [known(losses, number, number + 1) for number in range(3)] == [False, True, False]
    assert not known(losses, 0, 2)
    (group,) = losses_of([ppo], CPU, joined=True).groups
    assert not known(replace(losses, groups=[replace(group, joins_passes=True)]), 0, 1)


def _quadratic(weights: Tensor, targets: Targets) -> PairGradients:
    """The gradient of the sum of weights lp^2 / 2."""
    of_pairs = torch.zeros(int(targets.entries.max()) + 1).index_add_(0, targets.entries, weights)
    return lambda logprobs, pairs: of_pairs[pairs] * logprobs


IDS = 96
"""A multiple of 16 bytes, as grouped products take it."""


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("rows_of_a_chunk", [100, 7, 1])
@pytest.mark.parametrize("kind", ["no pair", "pair", "stack", "pair alone"])
def test_rows_and_matrices_get_the_gradients_of_a_backward(
    monkeypatch: pytest.MonkeyPatch, kind: str, rows_of_a_chunk: int, softcap: float | None
) -> None:
    """`pair alone`: an adapter of the output layer, which trains nothing before it. Of one chunk bits are the same."""
    monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", rows_of_a_chunk * IDS * 4)
    torch.manual_seed(0)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    base = torch.nn.Linear(16, IDS).requires_grad_(False)
    layer = MultiLoraLinear("lm_head", base, ActiveSegments())
    head = OutputLayer(layer.for_segment, base, LogitTransform(softcap=softcap), "lm_head")
    firsts = (2,) if kind == "stack" else ()
    shapes = [] if kind == "no pair" else [(*firsts, 8, 16), (*firsts, IDS, 8)]
    pair = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    ends = torch.tensor([25, 40], dtype=torch.int32) if kind == "stack" else None
    segment = LoraSegment(0, 40, 2.0, {"lm_head": (pair[0], pair[1])} if pair else {}, ends)
    hidden = torch.randn(40, 16, generator=generator).requires_grad_(kind != "pair alone")
    rows_of = [np.r_[0:20], np.r_[0:10, 20:30], np.r_[0:10, 30:40]]
    arrays = [rng.integers(0, IDS, shape) for shape in ((20,), (20, 3), (20, 2))]
    trained = rng.random(120) < 0.3
    weights = torch.from_numpy(rng.normal(size=120).astype(np.float32) * trained)
    targets = Targets.of(arrays, rows_of, trained, CPU)
    leaves = [*pair, *[hidden] * hidden.requires_grad]
    found: list[tuple[Tensor, Sequence[Tensor]]] = []
    for each in (targets, replace(targets, gradients=_quadratic(weights, targets))):
        logprobs = target_logprobs(hidden, each, head, segment, recompute=True)
        start = weights * logprobs.detach()
        found.append((logprobs.detach(), torch.autograd.grad(logprobs, leaves, start)))
    (expected, of_expected), (own, of_own) = found
    assert torch.equal(own, expected)
    for one, other in zip(of_own, of_expected, strict=True):
        if rows_of_a_chunk == 100:
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, atol=2e-5, rtol=5e-5)


class _Products(TorchDispatchMode):
    """Counts rows that are multiplied with the output layer's weight, forward or backward."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.rows = 0
        self._address = weight.data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self._count(*args[-2:])
        elif func is torch.ops.mkldnn._linear_pointwise.default:
            self._count(*args[:2])
        return func(*args, **(kwargs or {}))

    def _count(self, left: Tensor, right: Tensor) -> None:
        if right.data_ptr() == self._address:
            self.rows += len(left)


@pytest.mark.parametrize(("loss_fn", "products"), [*[(name, 2) for name in BY_ENTRY], ("gspo", 3)])
def test_several_chunks_need_two_products_with_the_vocabulary(small_chunks: None, loss_fn: str, products: int) -> None:
    backend = make_backend()
    backend.create_model("m", spec())
    data = sft(0, 60, 60) if loss_fn == "cross_entropy" else _with_masks(rl(0, 60, 60))
    if loss_fn != "gspo":
        for datum in data:
            datum.loss_inputs.pop("sequence_ratio_mask", None)
    entries = LOSSES[loss_fn].trained
    trained = 120 if entries is None else sum(int((datum.loss_inputs[entries] != 0).sum()) for datum in data)
    assert trained > 4 * ROWS_OF_A_CHUNK
    counted = _Products(rank_of(backend).base.packed.lm_head.base.weight)
    with counted:
        ok(backend.run([train("m", data, loss_fn)]))
    assert counted.rows == products * trained + (120 - trained)


def test_a_loss_that_is_marked_by_mistake_fails_its_pass(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients in chunks are those of another loss. The pass beside has its own."""
    monkeypatch.setitem(LOSSES, "gspo", replace(LOSSES["gspo"], by_entry=True))
    backend = make_backend()
    for name in ("m", "beside"):
        backend.create_model(name, spec())
    failed, beside = backend.run(
        [train("m", _with_masks(rl(0, 60, 60)), "gspo"), train("beside", rl(0, 60, 60), "ppo")]
    )
    assert "by_entry" in str(failed)
    ok([beside])
    adapters = rank_of(backend).adapters
    assert adapters["m"].gradient is None
    assert adapters["beside"].gradient is not None


def test_chunks_compute_the_loss_of_each_entry_once(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def counting(lp: Tensor, inputs: LossInputs, config: Mapping[str, float]) -> LossValue:
        counted.append(len(lp))
        return ppo(lp, inputs, config)

    monkeypatch.setitem(LOSSES, "ppo", replace(LOSSES["ppo"], function=counting))
    backend = make_backend()
    backend.create_model("m", spec())
    data = rl(0, 60, 60)
    ok(backend.run([train("m", data, "ppo")]))
    trained = sum(int((datum.loss_inputs["advantages"] != 0).sum()) for datum in data)
    assert len(counted) == 1 + -(-trained // ROWS_OF_A_CHUNK)
    assert sum(counted) == 120 + trained


class _Checked:
    """Compares the bits of the gradients that were used with those which the backward gets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compared, self.stacks = 0, 0
        at_once: Any = logprobs_module._AtOnce  # pyright: ignore[reportPrivateUsage]
        forward, backward = at_once.forward, at_once.backward

        def counting(ctx: Any, *arguments: Any) -> Tensor:
            self.stacks += arguments[3].stack is not None
            return forward(ctx, *arguments)

        def comparing(ctx: Any, gradient: Tensor) -> Any:
            self.compared += 1
            assert torch.equal(gradient, ctx.used)
            return backward(ctx, gradient)

        monkeypatch.setattr(at_once, "forward", staticmethod(counting))
        monkeypatch.setattr(at_once, "backward", staticmethod(comparing))


@pytest.mark.parametrize("grouped", [False, True], ids=["segment for each", "stacked"])
def test_the_backward_gets_the_gradient_that_was_used(
    small_chunks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, grouped: bool
) -> None:
    """Of adapters with and without the output layer and a value head, beside each other, and prompts in common."""
    monkeypatch.setattr(lora_rank, "groups_adapters", lambda device: grouped)
    checked = _Checked(monkeypatch)
    backend = make_backend(path=make_family("qwen2", tmp_path, vocab_size=100), merge=True)
    specs = [spec(), spec(), spec(train_unembed=False), spec(4), spec(), spec(value_head=True)]
    for number, each in enumerate(specs):
        backend.create_model(str(number), each)
    kinds = ["ppo", "cross_entropy", "dppo", "ppo", "dro", "importance_sampling"]
    data = [grpo(0, 2, 4, 12), sft(1, 30, 9), rl(2, 40), rl(3, 20, 20), rl(4, 30), with_returns(rl(5, 30))]
    ok(backend.run([train(str(n), own, kind) for n, (own, kind) in enumerate(zip(data, kinds, strict=True))]))
    assert (checked.compared, checked.stacks) == ((2, 1) if grouped else (6, 0))


def test_a_loss_that_is_not_finite_fails_the_pass_as_with_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios of e^80 and e^89: the gradient's square is beyond float32, or the sum is. The pass beside has its bits."""
    infinite = overflowing()
    for datum in infinite:
        datum.loss_inputs["logprobs"][:] = -120
    found: list[tuple[list[str], Tensor | None, float]] = []
    for rows in (1000, ROWS_OF_A_CHUNK):
        monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", rows * VOCAB * 4)
        backend = make_backend()
        for name in ("large", "infinite", "beside"):
            backend.create_model(name, spec())
        large, failed, beside = backend.run(
            [
                train("large", [*overflowing(), *rl(3, 30)], "ppo", clip_high_threshold=1e37),
                train("infinite", [*infinite, *rl(3, 30)], "importance_sampling"),
                train("beside", rl(2, 9), "ppo"),
            ]
        )
        (kept,) = ok([beside])
        adapters = rank_of(backend).adapters
        assert adapters["infinite"].gradient is None
        found.append(([str(large), str(failed)], adapters["beside"].gradient, kept.metrics["loss:sum"]))
    (errors, gradient, loss), (in_chunks, of_chunks, loss_of_chunks) = found
    assert errors[1] == in_chunks[1]
    assert "importance_sampling is" in errors[1]
    assert loss == loss_of_chunks
    assert gradient is not None
    assert of_chunks is not None
    assert torch.equal(gradient, of_chunks)


def test_an_adapter_learns_the_same_from_one_chunk_and_from_many(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients: list[Tensor] = []
    for rows in (1000, ROWS_OF_A_CHUNK):
        monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", rows * VOCAB * 4)
        backend = make_backend(path=base_path("qwen3-tied"))
        backend.create_model("m", spec())
        ok(backend.run([train("m", grpo(0, 3, 4, 20, 30), "ppo")]))
        gradient = rank_of(backend).adapters["m"].gradient
        assert gradient is not None
        gradients.append(gradient)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * float(gradients[0].abs().max()))
