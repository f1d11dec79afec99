"""Routing replay: the trainer uses the experts that a datum names, with its own router's weights for them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_request import ForwardBackwardRequest
from torch import Tensor, nn
from torch_lora_support import base_path, grpo, make_backend, make_full, ok, rl, saved, sft, spec, stock_logprobs, train
from transformers import AutoModelForCausalLM

from skyrl.base.pictures.vision import NoVision
from skyrl.base.types.requests import Command, Kind
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.engine.execution import PassPictures, run_passes
from skyrl.engine.ratios import RatioCheck
from skyrl.engine.stored_losses import StoredLosses
from skyrl.trainer.losses import LOSSES
from skyrl.trainer.protocol import Datum, InvalidRequest, Mixture, PassResult, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.rows.prefixes import experts_of, prefix_tree
from skyrl.trainer.rows.routed_experts import check_routed_experts, with_sorted_experts
from tests.local_ranks import rank_of
from tests.own_experts import own_experts

LENGTHS = (7, 31, 1, 18)
PICTURES = PassPictures(cast(Any, None), NoVision("it is a model of text"))
LOSSES_STORED = StoredLosses(cast(Any, None))
NO_MLP = {"train_mlp": False}
F32, I64 = np.float32, np.int64


def _stock(architecture: str = "mixture") -> Any:
    path = base_path(architecture)
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", experts_implementation="eager")


def _random_experts(seed: int, tokens: int, layers: int = 2) -> np.ndarray:
    """int64 [tokens, layers, 2] of 8 experts."""
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(8), (tokens, layers, 1)), axis=-1)[..., :2]


def _with(datum: Datum, experts: np.ndarray) -> Datum:
    return Datum(datum.tokens, {**datum.loss_inputs, "routed_experts": experts})


def _backend(architecture: str = "mixture") -> LoraBackend:
    backend = make_backend(architecture, micro_batch_tokens=40)
    backend.create_model("m", spec(8, 5, **NO_MLP))
    return backend


def _forward(backend: Any, data: list[Datum]) -> PassResult:
    return ok(backend.run([TrainingPass("m", data, "cross_entropy", backward=False)]))[0]


class _Forced(nn.Module):
    """A router that uses given experts: the softmax over the logits of these experts alone, scaled to the probability
    that the softmax over all experts gives them, unless it is normalised."""

    def __init__(self, router: Any, experts: Tensor) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), self.router.weight)
        weights = logits.gather(1, self.experts).softmax(-1)
        if not self.router.norm_topk_prob:
            weights = weights * logits.softmax(-1).gather(1, self.experts).sum(-1, keepdim=True)
        return logits, weights, self.experts


def _forced_logprobs(architecture: str, datum: Datum) -> Tensor:
    """The stock model's logprobs of a datum's targets, with routers that use the datum's experts."""
    model = _stock(architecture)
    experts = torch.from_numpy(datum.loss_inputs["routed_experts"])
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for number, block in enumerate(blocks):
        block.gate = _Forced(block.gate, experts[:, number])
    return stock_logprobs(model, datum)


@pytest.mark.parametrize(("architecture", "layers"), [("mixture", 2), ("mixture-with-dense-layer", 1)])
def test_the_trainer_uses_exactly_the_named_experts(architecture: str, layers: int) -> None:
    data = [_with(d, _random_experts(n, len(d.tokens), layers)) for n, d in enumerate(sft(3, *LENGTHS))]
    backend = _backend(architecture)
    free = _forward(backend, sft(3, *LENGTHS))
    result = _forward(backend, data)
    for datum, logprobs, other in zip(data, result.logprobs, free.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, _forced_logprobs(architecture, datum).detach(), atol=2e-5)
        assert np.abs(logprobs - other).max() > 1e-3


def test_gradients_go_through_the_routers_softmax(tmp_path: Any) -> None:
    """By finite differences: the loss changes as the gradient says. Attention is before every router."""
    data = [_with(d, _random_experts(n, len(d.tokens))) for n, d in enumerate(sft(3, 12, 9))]
    backend = _backend()
    adapter = rank_of(backend).adapters["m"]
    generator = torch.Generator().manual_seed(1)
    adapter.weights.add_(torch.randn(adapter.weights.shape, generator=generator) * 0.02)
    ok(backend.run([train("m", data)]))
    state = saved(backend, "m", tmp_path)
    gradient = adapter.pack({n.removeprefix("gradient."): v for n, v in state.items() if n.startswith("gradient.")})
    direction = gradient / gradient.norm()
    before, losses = adapter.weights.clone(), []
    for step in (-1e-2, 1e-2):
        adapter.weights.copy_(before + step * direction)
        losses.append(_forward(backend, data).metrics["loss:sum"])
    assert (losses[1] - losses[0]) / 2e-2 == pytest.approx(float(gradient.norm()), rel=5e-3)


def test_the_routers_own_experts_change_nothing_but_the_last_bits() -> None:
    stock, backend = _stock(), _backend()
    data = sft(3, *LENGTHS)
    own = [_with(datum, own_experts(stock, torch.from_numpy(datum.tokens)).numpy()) for datum in data]
    for one, other in zip(_forward(backend, own).logprobs, _forward(backend, data).logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_tokens_without_a_record_are_routed_freely() -> None:
    """Attention is causal: with records from token 9 on, the tokens before it see nothing of them."""
    (datum,) = sft(3, 20)
    experts = _random_experts(0, 20)
    partly = experts.copy()
    partly[:9] = -1
    backend = _backend()
    free, replayed, mixed = (
        _forward(backend, [each]).logprobs[0] for each in (datum, _with(datum, experts), _with(datum, partly))
    )
    np.testing.assert_allclose(mixed[:9], free[:9], atol=1e-6)
    assert np.abs(mixed - free)[9:].max() > 1e-3
    assert np.abs(mixed - replayed)[9:].max() > 1e-4
    one_layer = experts.copy()
    one_layer[:, 1] = -1
    assert np.abs(_forward(backend, [_with(datum, one_layer)]).logprobs[0] - replayed).max() > 1e-3


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_every_loss_takes_routed_experts(loss_fn: str) -> None:
    data = rl(1, 12) if loss_fn != "cross_entropy" else sft(1, 12)
    if loss_fn == "gspo":
        data[0].loss_inputs["sequence_ratio_mask"] = (data[0].loss_inputs["advantages"] != 0).astype(F32)
    replaying = [_with(data[0], _random_experts(1, 12))]
    free, replayed = ok(_backend().run([train("m", each, loss_fn) for each in (data, replaying)]))
    assert np.abs(free.logprobs[0] - replayed.logprobs[0]).max() > 1e-3


def test_full_fine_tuning_replays_the_routing() -> None:
    datum = _with(sft(3, 20)[0], _random_experts(0, 20))
    full = make_full("mixture")
    full.create_model("m", spec(0))
    (result,) = ok(full.run([train("m", [datum])]))
    np.testing.assert_allclose(result.logprobs[0], _forced_logprobs("mixture", datum).detach(), atol=2e-5)


@pytest.mark.parametrize("compact", [False, True])
def test_a_body_of_the_sdk_replays_the_routing(compact: bool) -> None:
    """From the bytes that the SDK sends to the logprobs, as the engine runs them."""
    experts = _random_experts(0, 20)
    (datum,) = sft(3, 20)
    sent = {**datum.loss_inputs, "routed_experts": packed(experts) if compact else experts}
    inputs = {name: types.TensorData.from_numpy(array) for name, array in sent.items()}
    data = [types.Datum(model_input=types.ModelInput.from_ints(datum.tokens.tolist()), loss_fn_inputs=inputs)]
    request = ForwardBackwardRequest(types.ForwardBackwardInput(data, "cross_entropy"), "m", 1)
    body = forward_backward_request_to_proto(request).SerializeToString()
    command = Command(1, "r", Kind.FORWARD, "t", "s", "m", 1, None, None, "proto", len(body))
    checks = LOSSES_STORED, RatioCheck()
    ((_, outcome),) = run_passes([command], {"r": body}, _backend(), PICTURES, *checks).outcomes
    output = pb.ForwardBackwardOutput.FromString(outcome.result)
    (record,) = output.loss_fn_outputs
    found = np.frombuffer(record.fields["logprobs"].data, F32)
    np.testing.assert_allclose(found, _forced_logprobs("mixture", _with(datum, experts)).detach(), atol=2e-5)


def _changed(place: tuple[int, ...], value: int | list[int]) -> np.ndarray:
    experts = _random_experts(0, 6)
    experts[place] = value
    return experts


def packed(experts: np.ndarray, kind: str = "u1") -> np.ndarray:
    """An eighth of the bytes of [N, layers, k]: int64 [N, ceil(layers * k / 8)]. With `kind` u2 a quarter."""
    flat = experts.astype(kind).reshape(len(experts), -1)
    return np.pad(flat, ((0, 0), (0, -flat.shape[1] % (8 // flat.itemsize)))).view(np.int64)


def test_packed_experts_are_the_same_experts() -> None:
    data = sft(3, 20, 9)
    experts = [_random_experts(1, 20), _random_experts(2, 9)]
    experts[0][4:7] = -1
    experts[1][3, 1] = -1
    assert packed(experts[0]).shape == (20, 1)
    backend = _backend()
    plain = _forward(backend, [_with(*each) for each in zip(data, experts, strict=True)])
    both = [_with(data[0], packed(experts[0])), _with(data[1], experts[1])]
    as_bytes = [_with(datum, packed(each)) for datum, each in zip(data, experts, strict=True)]
    for other in (as_bytes, both):
        for one, two in zip(plain.logprobs, _forward(backend, other).logprobs, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("compact", [False, True])
def test_rows_whose_experts_differ_in_order_alone_are_shared(compact: bool) -> None:
    """And the bytes after packed experts may differ."""
    targets = "target_tokens"
    data = [Datum(each.tokens, {targets: each.loss_inputs[targets]}) for each in grpo(0, 1, 4, 30)]
    longest = _random_experts(1, max(len(datum.tokens) for datum in data))
    rng = np.random.default_rng(0)
    ordered = [_with(datum, longest[: len(datum.tokens)]) for datum in data]
    shuffled = [_with(datum, rng.permuted(longest[: len(datum.tokens)], axis=-1)) for datum in data]
    if compact:
        shuffled = [_with(datum, packed(datum.loss_inputs["routed_experts"])) for datum in shuffled]
        for number, datum in enumerate(shuffled):
            datum.loss_inputs["routed_experts"].view(np.uint8)[:, -1] = number
    given = [datum.loss_inputs["routed_experts"].copy() for datum in shuffled]
    backend = _backend()
    one, two = (_forward(backend, each) for each in (ordered, shuffled))
    assert one.metrics == two.metrics
    assert one.metrics["computed_tokens:sum"] == prefix_tree(data).rows(range(4))
    for a, b in zip(one.logprobs, two.logprobs, strict=True):
        np.testing.assert_array_equal(a, b)
    for datum, before in zip(shuffled, given, strict=True):
        np.testing.assert_array_equal(datum.loss_inputs["routed_experts"], before)


def test_packed_experts_of_a_model_with_many_have_two_bytes_each() -> None:
    limits = Mixture(layers=3, experts=512, per_token=2)
    (datum,) = sft(0, 6)
    experts = np.tile([[511, 255], [256, 0], [3, 2]], (6, 1, 1))
    experts[2] = -1
    sent = _with(datum, packed(experts, "<u2"))
    assert sent.loss_inputs["routed_experts"].shape == (6, 2)
    check_routed_experts(sent, limits)
    check_routed_experts(_with(datum, packed(np.tile([253, 254], (6, 2, 1)))), Mixture(2, 255, 2))
    (read,) = experts_of(with_sorted_experts(train("m", [sent]), limits).data) or []
    assert read.dtype == np.int32
    assert read.tolist() == np.sort(experts, axis=-1).reshape(6, 6).tolist()
    with pytest.raises(InvalidRequest, match=r"or packed \[6, 2\].* got \[6, 1\]"):
        check_routed_experts(_with(datum, packed(experts)), limits)
    experts[4, 1, 0] = 512
    with pytest.raises(InvalidRequest, match=r"\[4, 1\] holds \[512, 0\]; experts are in \[0, 512\)"):
        check_routed_experts(_with(datum, packed(experts, "<u2")), limits)


WRONG: dict[str, tuple[np.ndarray, list[str]]] = {
    "floats": (_random_experts(0, 6).astype(F32), ["must be int64, got float32"]),
    "a token too few": (_random_experts(0, 5), ["[N, layers, k] = [6, 2, 2]", "got [5, 2, 2]"]),
    "a layer too many": (_random_experts(0, 6, 3), ["2 layers with experts", "got [6, 3, 2]"]),
    "flat": (_random_experts(0, 6).reshape(6, 4), ["or packed [6, 1]", "got [6, 4]"]),
    "an unknown expert": (_changed((3, 1, 0), 8), ["[3, 1] holds [8, ", "experts are in [0, 8)"]),
    "a negative expert": (_changed((2, 0), -2), ["[2, 0] holds [-2, -2]", "all -1"]),
    "half a record": (_changed((4, 0, 1), -1), ["[4, 0] holds [", "-1]"]),
    "an expert twice": (_changed((5, 1), 3), ["[5, 1] names an expert twice: [3, 3]"]),
    "one twice, packed": (packed(_changed((5, 1), 3)), ["[5, 1] names an expert twice: [3, 3]"]),
    "beyond int32": (_changed((3, 0), [2**32 + 1, 0]), ["[3, 0] holds [4294967297, 0]"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_routed_experts_are_refused_with_their_place(name: str) -> None:
    experts, words = WRONG[name]
    backend = _backend()
    good, bad = sft(0, 6, 6)
    with pytest.raises(InvalidRequest) as refused:
        backend.check(train("m", [_with(good, _random_experts(1, 6)), _with(bad, experts)]))
    assert str(refused.value).startswith("data[1]: loss_fn_inputs.routed_experts: ")
    for word in words:
        assert word in str(refused.value)


def test_a_dense_model_refuses_routed_experts_by_name() -> None:
    backend = make_backend()
    backend.create_model("m", spec())
    words = r"data\[0\]: loss_fn_inputs.routed_experts: the base model is no mixture of experts"
    with pytest.raises(InvalidRequest, match=words):
        backend.check(train("m", [_with(sft(0, 6)[0], _random_experts(0, 6))]))
