"""The output layer computes each row once, without a gradient where no loss has one, and its memory goes by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch_lora_support import VOCAB, grpo, make_backend, make_full, ok, rl, spec, train
from trainer_kinds import WHOLE

from skyrl.trainer.full.full_model import PlainModel
from skyrl.trainer.lora.linear import ActiveSegments, LoraSegment, MultiLoraLinear
from skyrl.trainer.model import logprobs as logprobs_module
from skyrl.trainer.model.loading import load_model
from skyrl.trainer.model.logprobs import LogitTransform, OutputLayer, Targets, exceed_a_chunk, target_logprobs
from skyrl.trainer.protocol import TrainingPass
from tests.families import make_family

CPU = torch.device("cpu")


class _Rows:
    """Counts the rows that go through a backend's output layer: with a gradient, and without."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained, self.other = 0, 0
        layer = MultiLoraLinear.for_segment

        def counting(linear: MultiLoraLinear, rows: Tensor, segment: LoraSegment) -> Tensor:
            if torch.is_grad_enabled():
                self.trained += len(rows)
            else:
                self.other += len(rows)
            return layer(linear, rows, segment)

        monkeypatch.setattr(MultiLoraLinear, "for_segment", counting)


def test_each_row_goes_through_the_output_layer_once_and_prompts_without_a_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = make_backend()
    backend.create_model("m", spec())
    data = grpo(1, 2, 6, 30)
    rows = _Rows(monkeypatch)
    (result,) = ok(backend.run([train("m", data, "ppo")]))
    answers = sum(int((datum.loss_inputs["advantages"] != 0).sum()) for datum in data)
    assert rows.trained == answers - 2 * 5, "the last row of a prompt predicts the first tokens of six answers"
    assert rows.trained + rows.other == result.metrics["computed_tokens:sum"]
    rows = _Rows(monkeypatch)
    ok(backend.run([TrainingPass("m", data, "ppo", backward=False)]))
    assert rows.trained == 0


@pytest.mark.parametrize("whole", [False, True], ids=["adapter", "whole model"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("rows_of_a_chunk", [10_000, 7, 1])
def test_logprobs_and_gradients_are_those_of_a_plain_log_softmax(
    monkeypatch: pytest.MonkeyPatch, rows_of_a_chunk: int, softcap: float | None, whole: bool
) -> None:
    monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", rows_of_a_chunk * VOCAB * 4)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    base = torch.nn.Linear(16, VOCAB)
    linear = (lambda rows, _: base(rows)) if whole else MultiLoraLinear("lm_head", base, ActiveSegments()).for_segment
    head = OutputLayer(linear, base, LogitTransform(softcap=softcap), "lm_head")
    pair = (torch.randn(3, 16, requires_grad=True), torch.randn(VOCAB, 3, requires_grad=True))
    segment = LoraSegment(0, 40, 2.0, {"lm_head": pair})
    rows_of = [np.r_[0:20], np.r_[0:10, 20:30], np.r_[0:10, 30:40]]
    arrays = [rng.integers(0, VOCAB, shape) for shape in ((20,), (20, 3), (20, 2))]
    trained = rng.random(20 + 60 + 40) < 0.3
    hidden = torch.randn(40, 16, requires_grad=True)
    targets = Targets.of(arrays, rows_of, trained, CPU)
    weights = torch.from_numpy(rng.normal(size=120).astype(np.float32) * trained)
    leaves = [hidden, *(base.parameters() if whole else pair)]
    recompute = exceed_a_chunk([targets], head)
    assert recompute == (rows_of_a_chunk < 40)
    chosen = target_logprobs(hidden, targets, head, segment, recompute=recompute)
    gradients = torch.autograd.grad((chosen * weights).sum(), leaves)
    all_rows = np.concatenate([np.repeat(rows, a[0].size) for rows, a in zip(rows_of, arrays, strict=True)])
    ids = np.concatenate([array.reshape(-1) for array in arrays])
    expected = head.for_segment(hidden, segment).log_softmax(-1)[all_rows, ids]
    torch.testing.assert_close(chosen, expected)
    for one, other in zip(gradients, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


ROWS, ROWS_OF_A_CHUNK, IDS, WIDTH = 2400, 8, 64, 32
Made = tuple[OutputLayer, LoraSegment, Sequence[Tensor]]


def _check_many_chunks(monkeypatch: pytest.MonkeyPatch, make: Callable[[torch.dtype], Made]) -> None:
    """In bfloat16 the gradients of 300 chunks are as near to those in float32 as the ones of a single chunk. make: the
    output layer in a dtype, a segment, and what gets a gradient from every chunk."""
    hidden = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = np.random.default_rng(1).integers(0, IDS, ROWS)
    targets = Targets.of([ids], [np.arange(ROWS)], np.ones(ROWS, np.bool_), CPU)

    def gradients(dtype: torch.dtype, rows_of_a_chunk: int) -> list[Tensor]:
        monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", rows_of_a_chunk * IDS * 4)
        head, segment, leaves = make(dtype)
        chosen = target_logprobs(hidden.to(dtype), targets, head, segment, recompute=True)
        return [each.float() for each in torch.autograd.grad(chosen.sum(), leaves)]

    exact = gradients(torch.float32, ROWS)
    of_one, of_many = (gradients(torch.bfloat16, rows) for rows in (ROWS, ROWS_OF_A_CHUNK))
    for right, one, many in zip(exact, of_one, of_many, strict=True):
        errors = [float((found - right).norm() / right.norm()) for found in (one, many)]
        assert 0 < errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize("stacked", [False, True], ids=["adapter", "stack"])
def test_an_adapters_gradient_keeps_its_precision_over_many_chunks(
    monkeypatch: pytest.MonkeyPatch, stacked: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    firsts = (2,) if stacked else ()
    weight, *pair = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((IDS, WIDTH), (*firsts, 8, WIDTH), (*firsts, IDS, 8))
    )
    ends = torch.tensor([1000, ROWS], dtype=torch.int32) if stacked else None

    def make(dtype: torch.dtype) -> Made:
        base = torch.nn.Linear(WIDTH, IDS, bias=False, dtype=dtype).requires_grad_(False)
        base.weight.copy_(weight)
        lora_a, lora_b = (matrix.to(dtype).requires_grad_() for matrix in pair)
        layer = MultiLoraLinear("lm_head", base, ActiveSegments())
        segment = LoraSegment(0, ROWS, 0.1, {"lm_head": (lora_a, lora_b)}, ends)
        return OutputLayer(layer.for_segment, base, LogitTransform(), "lm_head"), segment, [lora_a, lora_b]

    _check_many_chunks(monkeypatch, make)


@pytest.mark.parametrize("family", ["qwen2", "phi"], ids=["tied", "with a bias"])
def test_the_output_layers_gradient_keeps_its_precision_over_many_chunks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    path = make_family(family, tmp_path, vocab_size=IDS, hidden_size=WIDTH)

    def make(dtype: torch.dtype) -> Made:
        packed = PlainModel(load_model(path, torch.bfloat16).to(dtype))
        head = packed.lm_head
        return head, LoraSegment(0, ROWS, 1.0), list(head.base.parameters())

    _check_many_chunks(monkeypatch, make)


class _Peak(TorchDispatchMode):
    """The largest number of bytes of living tensors [rows, vocabulary], without transposed weights.

    A tensor lives as long as its storage: autograd keeps the storage without the Python object."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else [made]:
            if isinstance(tensor, Tensor) and tensor.shape[1:] == (VOCAB,) and tensor.is_contiguous():
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._alive[reference.cdata] = (reference, storage.nbytes())
        self._alive = {address: each for address, each in self._alive.items() if not each[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return made


CHUNK = 64 * VOCAB * 4


def _peak_in_chunks(monkeypatch: pytest.MonkeyPatch, case: str) -> float:
    """Of 600 rows with a gradient, which have 9.4 chunks of logits."""
    monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", CHUNK)
    whole, merged = case == "whole model", case == "merged adapters"
    backend = make_full(micro_batch_tokens=4096) if whole else make_backend(merge=merged)
    tenants = 10 if merged else 1
    for number in range(tenants):
        backend.create_model(str(number), WHOLE if whole else spec())
    peak = _Peak()
    passes = [train(str(number), rl(number, *[60] * (10 // tenants)), "dro") for number in range(tenants)]
    with peak:
        ok(backend.run(passes))
    return peak.bytes / CHUNK


@pytest.mark.parametrize("case", ["adapter", "merged adapters", "whole model"])
def test_logits_take_the_memory_of_few_chunks_in_backward_too(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    assert 0.9 <= _peak_in_chunks(monkeypatch, case) <= 3


def test_logits_that_are_not_recomputed_all_live_until_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the test above can fail."""
    monkeypatch.setattr(logprobs_module, "checkpoint", lambda function, *arguments, **_: function(*arguments))
    assert _peak_in_chunks(monkeypatch, "whole model") > 9


@pytest.mark.parametrize("vocabulary", [VOCAB, 16_411])
def test_logprobs_in_the_place_of_their_logits_have_the_bits_of_torchs_logsumexp(vocabulary: int) -> None:
    """Also where logits are huge or minus infinity. Rows whose logits are not finite have torch's NaN and infinities,
    and a gradient that is not finite."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, vocabulary, generator=generator) * 5
    logits[1] *= 1e30
    logits[2, 3:] = -torch.inf
    logits[3], logits[4, 2], logits[5, 2] = -torch.inf, torch.inf, torch.nan
    rows, ids = torch.arange(7), torch.tensor([0, 1, 2, 3, 2, 1, 4])
    leaf = logits.clone().requires_grad_()
    found = logprobs_module._LogSoftmaxAt.apply(leaf * 1, rows, ids)  # pyright: ignore[reportPrivateUsage]
    expected = logits[rows, ids] - logits.logsumexp(1)
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=0, equal_nan=True)
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    assert gradient.isfinite().all(1).tolist() == [True, True, True, False, False, False, True]
    of_ids = torch.nn.functional.one_hot(ids, vocabulary)
    torch.testing.assert_close(gradient[[0, 1, 2, 6]], (of_ids - logits.softmax(1))[[0, 1, 2, 6]])


def test_padding_of_the_vocabulary_has_no_logits_and_hidden_states_are_divided() -> None:
    """As Inkling's config.json says."""
    config = SimpleNamespace(vocab_size=VOCAB, unpadded_vocab_size=VOCAB - 6, logits_mup_width_multiplier=4.0)
    torch.manual_seed(0)
    base, hidden = torch.nn.Linear(16, VOCAB, bias=False), torch.randn(5, 16, requires_grad=True)
    head = OutputLayer(lambda rows, _: base(rows), base, LogitTransform.of(config))
    ids = np.array([0, 3, VOCAB - 7, 1, 2])
    targets = Targets.of([ids], [np.arange(5)], np.ones(5, np.bool_), CPU)
    chosen = target_logprobs(hidden, targets, head, LoraSegment(0, 5, 1.0), recompute=False)
    expected = (base(hidden) / 4)[:, : VOCAB - 6].log_softmax(-1)[range(5), ids]
    torch.testing.assert_close(chosen, expected)
    leaves = [hidden, base.weight]
    found, theirs = (torch.autograd.grad(each.square().sum(), leaves) for each in (chosen, expected))
    for one, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(one, other)
    padded = SimpleNamespace(vocab_size=VOCAB, unpadded_vocab_size=VOCAB)
    assert LogitTransform.of(padded) == LogitTransform()
