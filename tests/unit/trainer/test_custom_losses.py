"""Custom losses: the numbers of the SDK's client, on one device and over ranks; graphs that are refused; bounds."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from custom_losses import client_side, handle_of, loss_of, traced
from tinker.lib.public_interfaces.custom_loss import LossHandle
from torch import Tensor
from torch_lora_support import make_backend, make_full, make_ranks, ok, rl, saved, spec, stored_tensors, train

from skyrl.base.types import custom_loss as names
from skyrl.base.types.custom_loss import LossNode
from skyrl.trainer.custom_loss import graph as graph_module
from skyrl.trainer.custom_loss.graph import META, LossGraph, Work
from skyrl.trainer.custom_loss.operations import FUNCTIONS, MASKED, METHODS
from skyrl.trainer.protocol import AdamParams, Backend, Datum, InvalidRequest, TrainingPass


def reinforce(logprobs: Any, advantages: Any) -> Any:
    loss = -(logprobs * advantages).sum()
    return loss, {"custom/tokens:sum": (advantages != 0).sum(), "custom/mean_logprob:mean": logprobs.mean()}


def preference(logprobs: Any, rejected: Any, weights: Any, beta: Any) -> Any:
    """A DPO-like loss of a pair: the chosen answer is scored here, the rejected one was."""
    chosen = (logprobs * weights).sum() / weights.sum().clamp(min=1)
    margin = beta * (chosen - rejected.mean())
    return -F.logsigmoid(margin), {"custom/margin:mean": margin, "custom/accuracy:mean": (margin > 0).float()}


def clipped(logprobs: Any, old: Any, advantages: Any) -> Any:
    """With an index by a mask, and a step between neighbours."""
    mask = advantages != 0
    ratio = torch.exp(logprobs - old)[mask]
    chosen = advantages[mask]
    objective = torch.minimum(ratio * chosen, torch.clamp(ratio, 0.8, 1.2) * chosen)
    smooth = (logprobs[1:] - logprobs[:-1]).square().mean() / logprobs.shape[0] ** 0.5
    return smooth - objective.sum(), {"custom/ratio:mean": ratio.mean(), "custom/top:sum": ratio.max(dim=0).values}


def data_of(*lengths: int) -> list[Datum]:
    rng = np.random.default_rng(3)
    data = []
    for datum in rl(1, *lengths):
        inputs: dict[str, Any] = dict(datum.loss_inputs)
        inputs["old"] = inputs.pop("logprobs")
        inputs["weights"] = (inputs["advantages"] != 0).astype(np.float32)
        inputs["rejected"] = rng.normal(-4, 1, 5).astype(np.float32)
        inputs["beta"] = np.array([0.3], np.float32)
        data.append(Datum(datum.tokens, inputs))
    return data


LOSSES = (
    handle_of(reinforce, advantages=1),
    handle_of(preference, rejected=1, weights=1, beta=0),
    handle_of(clipped, old=1, advantages=1),
)
DATA = data_of(20, 9, 31, 14)


def of_server(handle: LossHandle, data: Sequence[Datum] = DATA, model_id: str = "m") -> TrainingPass:
    return replace(train(model_id, [*data], "custom"), custom_loss=loss_of(handle))


def learned(backend: Backend) -> Backend:
    backend.create_model("m", spec(seed=4))
    ok(backend.run([train("m", rl(0, 25), "importance_sampling")]))
    backend.optim_step("m", AdamParams(learning_rate=1e-2))
    return backend


def by_client(backend: Backend, handle: LossHandle) -> tuple[float, dict[str, float], list[np.ndarray]]:
    """As the SDK: a forward, the loss in the client, and a backward of cross_entropy."""
    bare = [Datum(each.tokens, {"target_tokens": each.loss_inputs["target_tokens"]}) for each in DATA]
    (scored,) = ok(backend.run([replace(train("m", bare), backward=False)]))
    loss, metrics, weights = client_side(handle, [*map(_with_a_scalar, DATA)], scored.logprobs)
    linear = [
        Datum(each.tokens, {**each.loss_inputs, "weights": of_datum})
        for each, of_datum in zip(bare, weights, strict=True)
    ]
    ok(backend.run([train("m", linear)]))
    return loss, dict(metrics), scored.logprobs


def _with_a_scalar(datum: Datum) -> Datum:
    """As the client has it: the wire makes a vector of a scalar."""
    return Datum(datum.tokens, {**datum.loss_inputs, "beta": datum.loss_inputs["beta"].reshape(())})


@pytest.mark.parametrize("handle", LOSSES, ids=lambda handle: handle.name)
def test_the_server_computes_what_the_client_does(handle: LossHandle, tmp_path: Path) -> None:
    client, server = (learned(make_backend(micro_batch_tokens=budget)) for budget in (4096, 48))
    loss, metrics, logprobs = by_client(client, handle)
    (result,) = ok(server.run([of_server(handle)]))
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert {name: result.metrics[name] for name in metrics} == pytest.approx(metrics, rel=1e-5)
    assert result.metrics["num_tokens:sum"] == sum(len(each.tokens) for each in DATA)
    for one, other in zip(result.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    assert_close_gradients(gradients_in(server, tmp_path / "server"), gradients_in(client, tmp_path / "client"))


def test_names_of_a_critics_inputs_are_free_for_custom_losses() -> None:
    handle = handle_of(lambda logprobs, rewards: ((logprobs * rewards).sum(), {}), rewards=1)
    data = [
        Datum(each.tokens, {"target_tokens": each.loss_inputs["target_tokens"], "rewards": each.loss_inputs["old"]})
        for each in DATA
    ]
    (result,) = ok(learned(make_backend()).run([of_server(handle, data)]))
    expected = sum(
        float(np.sum(one * each.loss_inputs["old"])) for one, each in zip(result.logprobs, DATA, strict=True)
    )
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def gradients_in(backend: Backend, path: Path) -> dict[str, Tensor]:
    path.mkdir(exist_ok=True)
    backend.save_state("m", path)
    found = {name: each for name, each in stored_tensors(path).items() if name.startswith("gradient.")}
    assert found
    return found


def assert_close_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    largest = max(float(each.abs().max()) for each in expected.values())
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert float((gradient - expected[name]).abs().max()) < 1e-5 * largest, name


def test_the_gradient_of_logprobs_has_the_clients_bits() -> None:
    rng = np.random.default_rng(0)
    for handle in LOSSES:
        graph = LossGraph(loss_of(handle))
        for datum in DATA:
            logprobs = rng.normal(-2, 1, len(datum.tokens)).astype(np.float32)
            scalar = _with_a_scalar(datum)
            loss, metrics, weights = client_side(handle, [scalar], [logprobs])
            others = [torch.tensor(scalar.loss_inputs[name]) for name in handle.input_names]
            found = graph.evaluate([torch.from_numpy(logprobs), *others], Work(), backward=True)
            assert (found.loss, dict(found.metrics)) == (loss, metrics)
            assert found.gradient is not None
            assert np.array_equal(-found.gradient.numpy(), weights[0])


@pytest.mark.parametrize("kind", ["adapters", "whole model"])
def test_ranks_agree_with_one_device(kind: str, tmp_path: Path) -> None:
    """The last sequence is divided among the ranks."""
    data = data_of(20, 9, 31, 14, 90)
    one, many = (
        (make_backend(micro_batch_tokens=48), make_ranks(2))
        if kind == "adapters"
        else (make_full(), make_full(ranks=2))
    )
    try:
        for handle in LOSSES:
            results = []
            for backend in (one, many):
                backend.delete_model("m")
                backend.create_model("m", spec(seed=4) if kind == "adapters" else spec(0))
                results += ok(backend.run([of_server(handle, data)]))
            assert results[1].metrics == pytest.approx(results[0].metrics, rel=1e-5)
        assert_close_gradients(*(gradients_in(each, tmp_path / str(number)) for number, each in enumerate((one, many))))
        broken = [*data[:-1], _with_advantages(data[-1], np.nan)]
        (outcome,) = many.run([of_server(LOSSES[0], broken)])
        assert isinstance(outcome, InvalidRequest)
        assert_close_gradients(*(gradients_in(many, tmp_path / f"again {number}") for number in range(2)))
    finally:
        many.close()


def _with_advantages(datum: Datum, value: float) -> Datum:
    advantages = datum.loss_inputs["advantages"].copy()
    advantages[-1] = value
    return Datum(datum.tokens, {**datum.loss_inputs, "advantages": advantages})


def test_a_pass_at_fault_leaves_no_gradient_and_its_neighbours_alone(tmp_path: Path) -> None:
    backend = learned(make_backend(merge=True, micro_batch_tokens=48))
    good, bad = of_server(LOSSES[0]), of_server(LOSSES[0], [*DATA[:-1], _with_advantages(DATA[-1], np.inf)])
    outcomes = backend.run([good, bad])
    assert isinstance(outcomes[1], InvalidRequest)
    assert "data[3]: loss_fn: custom loss 'reinforce': node 'advantages' (advantages): its loss is" in str(outcomes[1])
    alone = learned(make_backend(micro_batch_tokens=48))
    ok(alone.run([good]))
    assert_close_gradients(gradients_in(backend, tmp_path / "both"), gradients_in(alone, tmp_path / "alone"))


def test_a_forward_gives_loss_and_metrics_and_no_gradient(tmp_path: Path) -> None:
    backend = learned(make_backend())
    forward = ok(backend.run([replace(of_server(LOSSES[1]), backward=False)]))
    assert not [name for name in saved(backend, "m", tmp_path / "m") if name.startswith("gradient.")]
    backward = ok(backend.run([of_server(LOSSES[1])]))
    assert forward[0].metrics == pytest.approx(backward[0].metrics)
    assert "custom/accuracy:mean" in forward[0].metrics


def _run(function: Any, *shapes: tuple[int, ...], **ranks: int) -> str:
    """What refuses the loss for logprobs and inputs of ones of these shapes; empty if it is computed."""
    graph = LossGraph(traced(function, **ranks))
    try:
        graph.check([torch.ones(shape, device=META) for shape in shapes])
        graph.evaluate([torch.ones(shape) for shape in shapes], Work(), backward=True)
    except InvalidRequest as error:
        return str(error)
    return ""


def _loss(value: Any) -> Any:
    return value.sum(), {}


REFUSED: dict[str, tuple[Any, str]] = {
    "another shape": (
        lambda logprobs: _loss(logprobs[1:] * logprobs),
        "node 'mul' (operator.mul): Attempting to broadcast a dimension of length 8",
    ),
    "a vector": (lambda logprobs: (logprobs * 2, {}), "must return a scalar loss, got shape [8]"),
    "no gradient": (lambda logprobs: _loss(logprobs.detach()), "does not depend on logprobs"),
    "a metric of many": (lambda logprobs: (logprobs.sum(), {"custom/a:sum": logprobs}), "must be one number"),
    "nan": (lambda logprobs: _loss(torch.log(logprobs - 2)), "node 'log' (torch.log): its loss is nan; NaN first"),
    "infinity": (lambda logprobs: _loss(1 / (logprobs - 1)), "node 'truediv' (operator.truediv): its loss is inf"),
    "a gradient of nan": (
        lambda logprobs: _loss(torch.where(logprobs > 0, 0 * logprobs, (logprobs - 1).sqrt())),
        "its gradient is not finite",
    ),
    "a large tensor": (lambda logprobs: _loss(logprobs.expand(2**24, 8)), "node 'expand' (expand): the results up to"),
    "a large one behind a mask": (
        lambda logprobs: _loss(logprobs[logprobs > 0].repeat(2**26)),
        "node 'repeat' (repeat): the results up to",
    ),
    "a large product": (
        lambda logprobs: _loss(logprobs.expand(2**12, 8) @ logprobs.expand(2**12, 8).T),
        "",
    ),
    "a product of few numbers that needs many": (
        lambda logprobs: _loss(logprobs.new_ones((2, 2**10, 1, 2**10)) @ logprobs.new_ones((2, 1, 2**10, 2**10))),
        "the results up to here have more than",
    ),
    "whole numbers towards 0": (
        lambda logprobs: _loss(logprobs + (7 * logprobs.long()).div(2, rounding_mode="trunc")),
        "rounding_mode trunc takes no whole numbers",
    ),
    "numbers towards 0": (lambda logprobs: _loss(logprobs + (7 * logprobs).div(2, rounding_mode="trunc")), ""),
    "a remainder": (lambda logprobs: _loss(logprobs + 7 * logprobs.long() % 2), ""),
    "a power of whole numbers": (lambda logprobs: _loss(logprobs * logprobs.shape[0] ** 400), "node 'pow_1'"),
    "a long tuple": (lambda logprobs: _loss(logprobs.new_zeros(logprobs.shape * 10**9)), "takes tensors and numbers"),
    "an index out of range": (lambda logprobs: _loss(logprobs[8]), "node 'getitem' (operator.getitem): index 8"),
    "a wrong keyword": (lambda logprobs: _loss(logprobs.clamp(most=3)), "node 'clamp' (clamp): "),
}


@pytest.mark.parametrize(("function", "words"), REFUSED.values(), ids=REFUSED)
def test_a_loss_that_cannot_be_computed_is_refused_by_its_node(function: Any, words: str) -> None:
    said = _run(function, (8,))
    assert words in said
    assert bool(words) == bool(said)


def test_an_index_of_many_numbers_is_foreseen() -> None:
    def gathered(logprobs: Any, index: Any) -> Any:
        return logprobs[index.long().expand(2**23, 8)].sum(), {}

    assert "node 'expand'" in _run(gathered, (8,), (8,), index=1)
    assert _run(lambda logprobs, index: (logprobs[index.long()].sum(), {}), (8,), (6,), index=1) == ""


def test_a_pass_has_a_bound_on_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = learned(make_backend())
    monkeypatch.setattr(graph_module, "MAX_WORK", 4 * graph_module.OPERATION)
    (outcome,) = backend.run([of_server(LOSSES[0])])
    assert "send fewer sequences" in str(outcome)


def test_data_that_the_loss_was_not_created_for_are_refused() -> None:
    backend = learned(make_backend())
    for name, array, words in (
        ("advantages", None, "data[3]: loss_fn_inputs.advantages: missing; the custom loss 'reinforce' takes it"),
        (
            "advantages",
            np.ones((14, 2), np.float32),
            "has 2 dimensions, and the custom loss 'reinforce' was created for 1",
        ),
        ("target_tokens", np.ones((14, 2), np.int64), "loss_fn_inputs.target_tokens: has 2 dimensions"),
    ):
        inputs = {key: value for key, value in DATA[-1].loss_inputs.items() if key != name}
        inputs |= {} if array is None else {name: array}
        (outcome,) = backend.run([of_server(LOSSES[0], [*DATA[:-1], Datum(DATA[-1].tokens, inputs)])])
        assert words in str(outcome)
    (outcome,) = backend.run([train("m", [*DATA], "custom")])
    assert "no loss 'custom'" in str(outcome)


def test_two_dimensional_targets(tmp_path: Path) -> None:
    """Soft targets: logprobs [T, K] and weights [T, K]."""
    rng = np.random.default_rng(1)
    data = [
        Datum(
            each.tokens,
            {
                "target_tokens": rng.integers(0, 90, (len(each.tokens), 3)),
                "weights": rng.random((len(each.tokens), 3)).astype(np.float32),
            },
        )
        for each in DATA
    ]
    built_in, custom = (learned(make_backend(micro_batch_tokens=48)) for _ in range(2))
    soft = handle_of(lambda logprobs, weights: (-(logprobs * weights).sum(), {}), logprobs=2, weights=2)
    (expected,), (found,) = ok(built_in.run([train("m", data)])), ok(custom.run([of_server(soft, data)]))
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    assert_close_gradients(*(gradients_in(each, tmp_path / str(n)) for n, each in enumerate((custom, built_in))))


def _tried() -> list[tuple[Any, ...]]:
    """Arguments, of which each operation takes some."""
    matrix, vector = torch.rand(3, 3) * 0.8 + 0.1, torch.rand(3) * 0.8 + 0.1
    whole, mask = torch.tensor([0, 2, 1]), vector > 0.5
    of_one = [vector, matrix, whole, mask, 0.5, 3, (3,), [vector, vector]]
    of_two = [vector, matrix, whole, mask, 0, 1, 0.5, 3, (3, 1), (1, 0), (1, 1), torch.float64]
    of_three = [(0, whole), (0, 1), (0.0, 1.0), (0.5, 0.5), (mask, vector), (0, (3, 1)), ((3,), 1.0), (mask, 0.0)]
    found: list[tuple[Any, ...]] = [(each,) for each in of_one]
    found += [(one, other) for one in (vector, matrix, whole, mask, 0.5) for other in of_two]
    found += [(one, *others) for one in (vector, matrix) for others in of_three]
    found += [((3,), 1.0), (0.0, 1.0, 3), (mask, vector, vector), (vector, vector, vector), (vector, 0, whole, vector)]
    return [*found, (vector, 0, 0, 2), (matrix[None], matrix[None])]


def test_every_operation_works_and_its_shape_is_foreseen() -> None:
    """What torch cannot foresee is refused; each operation works with some arguments."""
    every = {*FUNCTIONS, *METHODS} - {"getattr", *MASKED}
    worked: Counter[str] = Counter()
    for name in sorted(every):
        operation = FUNCTIONS.get(name) or METHODS[name]
        created = {"device": META} if name.removeprefix("torch.") in names.CREATIONS else {}
        for args in _tried():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    real = operation(*args)
                    foreseen = operation(*graph_module._on_meta(list(args)), **created)
            except Exception:
                continue
            pairs = zip(graph_module._tensors(real), graph_module._tensors(foreseen), strict=True)
            assert all((one.shape, one.dtype) == (other.shape, other.dtype) for one, other in pairs), (name, args)
            node = LossNode("call_function" if name in FUNCTIONS else "call_method", "node", name, args, {})
            size = sum(each.numel() for each in graph_module._tensors(real))
            assert size <= graph_module._most(node, args, {}, 2**30), (name, args)
            worked[name] += 1
            if worked[name] == 5:
                break
    assert set(worked) == every
