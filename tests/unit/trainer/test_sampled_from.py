"""Targets are scored over the distribution that they were sampled from: at a temperature, cut by top-k and top-p, or to
recorded tokens; so the ratio of fresh samples is 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from test_output_layer import CHUNK, _Peak  # pyright: ignore[reportPrivateUsage]
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_request import ForwardBackwardRequest
from torch import Tensor
from torch_lora_support import (
    VOCAB,
    base_path,
    files_saved,
    grpo,
    make_backend,
    make_full,
    make_ranks,
    ok,
    rl,
    sft,
    spec,
    train,
)
from trainer_kinds import WHOLE
from transformers import AutoModelForCausalLM

from skyrl.base.pictures.vision import NoVision
from skyrl.base.types.requests import Command, Kind
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.engine.execution import PassPictures, run_passes
from skyrl.engine.ratios import NOTICE, RatioCheck
from skyrl.engine.stored_losses import StoredLosses
from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.losses import LOSSES
from skyrl.trainer.model import logprobs as logprobs_module
from skyrl.trainer.model.logprobs import LogitTransform, OutputLayer, Targets, target_logprobs
from skyrl.trainer.model.restricted import RestrictedLogSoftmaxAt, Restriction
from skyrl.trainer.protocol import Datum, InvalidRequest, TrainingPass
from skyrl.trainer.ranks.full_backend import FullBackend
from skyrl.trainer.rows.sampled_from import SampledFrom, Scorings

CPU = torch.device("cpu")
PICTURES = PassPictures(cast(Any, None), NoVision("it is a model of text"))
LOSSES_STORED = StoredLosses(cast(Any, None))
WAYS = [
    SampledFrom(),
    SampledFrom(temperature=0.6),
    SampledFrom(top_k=1),
    SampledFrom(top_k=9),
    SampledFrom(top_p=0.8),
    SampledFrom(1.7, 20, 0.9),
    SampledFrom(0.5, 5, 0.3),
    SampledFrom(1.0, 5000, 0.05),
]


def kept_by(logits: np.ndarray, way: SampledFrom) -> np.ndarray:
    """The ids that a sampler keeps of logits [vocabulary], in float64: the likeliest k, and of these the likeliest of
    which the ones before have less than p together. Logits differ."""
    scaled = logits.astype(np.float64) / way.temperature
    order = np.argsort(-scaled)
    if way.top_k:
        order = order[: way.top_k]
    probabilities = np.exp(scaled[order] - scaled[order].max())
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities) - probabilities
    return order[before < way.top_p]


def expected_logprob(logits: Tensor, kept: np.ndarray, target: int, temperature: float) -> Tensor:
    """By torch's own log_softmax over the kept tokens and the target."""
    ids = np.unique([*kept, target])
    return (logits / temperature)[ids].log_softmax(0)[int(np.searchsorted(ids, target))]


def test_logprobs_and_gradients_are_those_of_a_log_softmax_over_what_is_kept() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=3, size=(len(WAYS) + 1, VOCAB)).astype(np.float32)
    recorded = rng.choice(VOCAB, 12, replace=False)
    kept = [kept_by(row, way) for row, way in zip(logits, WAYS, strict=False)] + [recorded]
    ways = [*WAYS, SampledFrom(0.8)]
    scorings = Scorings([], ways, [np.zeros(0, np.int64)] * len(WAYS) + [np.sort(recorded)])
    restriction = Restriction.of(scorings, np.arange(len(ways)))
    owners = np.repeat(np.arange(len(ways)), 8)
    ids = np.concatenate([np.unique([*own[:2], *rng.choice(VOCAB, 30)])[-8:] for own in kept])
    weights = torch.from_numpy(rng.normal(size=len(ids)))
    leaf = torch.from_numpy(logits.copy()).requires_grad_()
    found, outside = RestrictedLogSoftmaxAt.apply(
        leaf * 1, torch.from_numpy(owners), torch.from_numpy(ids), restriction
    )
    (gradient,) = torch.autograd.grad((found * weights.float()).sum(), leaf)
    exact = torch.from_numpy(logits).double().requires_grad_()
    expected = torch.stack(
        [expected_logprob(exact[o], kept[o], t, ways[o].temperature) for o, t in zip(owners, ids, strict=True)]
    )
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)
    assert outside.tolist() == [t not in kept[o] for o, t in zip(owners, ids, strict=True)]
    assert 10 < int(outside.sum()) < len(ids) - 10
    torch.testing.assert_close(
        gradient.double(), torch.autograd.grad((expected * weights).sum(), exact)[0], atol=1e-5, rtol=1e-5
    )


def test_tokens_that_equal_the_least_one_kept_are_kept_with_it() -> None:
    logits = torch.tensor([[3.0, 1, 2, 2, 2, 0], [3, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    scorings = Scorings(
        [], [SampledFrom(top_k=2), SampledFrom(top_k=2, top_p=0.4), SampledFrom(top_p=0.1)], [np.zeros(0, np.int64)] * 3
    )
    Restriction.of(scorings, np.arange(3)).cut(logits)
    assert torch.isfinite(logits).tolist() == [[True, False, True, True, True, False], [True] + [False] * 5, [True] * 6]


@pytest.mark.parametrize("rows_of_a_chunk", [10_000, 7, 1])
def test_rows_that_are_scored_in_several_ways_train_as_if_each_way_were_alone(
    monkeypatch: pytest.MonkeyPatch, rows_of_a_chunk: int
) -> None:
    """Three sequences share rows, as prompts do; positions have different ways, some with recorded tokens."""
    monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", rows_of_a_chunk * VOCAB * 4)
    rng = np.random.default_rng(1)
    torch.manual_seed(0)
    base = torch.nn.Linear(16, VOCAB)
    head = OutputLayer(lambda rows, _: base(rows), base, LogitTransform(softcap=6.0), "lm_head")
    rows_of = [np.r_[0:20], np.r_[0:10, 20:30], np.r_[0:10, 30:40]]
    arrays = [rng.integers(0, VOCAB, shape) for shape in ((20,), (20, 3), (20,))]
    empty = np.zeros(0, np.int64)
    ways = [SampledFrom(0.7, 30, 0.95), SampledFrom(), SampledFrom(1.3), SampledFrom(1.3)]
    sets = [empty, empty, np.arange(0, VOCAB, 3), np.arange(1, VOCAB, 2)]
    scorings = Scorings([np.zeros(20, np.int64), np.ones(20, np.int64), rng.integers(0, 4, 20)], ways, sets)
    trained = rng.random(20 + 60 + 20) < 0.4
    hidden = torch.randn(40, 16, requires_grad=True)
    targets = Targets.of(arrays, rows_of, trained, CPU, scorings)
    weights = torch.from_numpy(rng.normal(size=100).astype(np.float32) * trained)
    leaves = [hidden, *base.parameters()]
    found = target_logprobs(hidden, targets, head, LoraSegment(0, 40, 1.0), recompute=rows_of_a_chunk < 100)
    gradients = torch.autograd.grad((found * weights).sum(), leaves)

    logits = head.transform(base(hidden))
    expected, outside = [], []
    for rows, array, numbers in zip(rows_of, arrays, scorings.of_positions, strict=True):
        for row, of_row, number in zip(rows, array.reshape(20, -1), numbers, strict=True):
            kept = sets[number] if len(sets[number]) else kept_by(logits[row].detach().numpy(), ways[number])
            for target in of_row:
                expected.append(expected_logprob(logits[row], kept, int(target), ways[number].temperature))
                outside.append(float(target not in kept))
    torch.testing.assert_close(found, torch.stack(expected))
    assert targets.outside is not None
    assert targets.outside.tolist() == outside
    assert 0 < sum(outside) < 100
    for one, other in zip(gradients, torch.autograd.grad((torch.stack(expected) * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_cut_logits_take_the_memory_of_few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", CHUNK)
    backend = make_backend()
    backend.create_model("m", spec())
    peak = _Peak()
    with peak:
        ok(backend.run([train("m", rl(0, *[60] * 10), "dro", top_p=0.9, sampling_temperature=0.7)]))
    assert 0.9 <= peak.bytes / CHUNK <= 3


# --- whole backends -----------------------------------------------------------------------------------------------

WAY = SampledFrom(0.7, 30, 0.9)
CONFIG = {"sampling_temperature": 0.7, "top_k": 30.0, "top_p": 0.9}


def sampled(seed: int, way: SampledFrom, *, record: bool = False, samples: int = 3) -> list[Datum]:
    """Groups of answers that transformers' model has sampled, with the logprobs of the distribution sampled from;
    `record`: and with the tokens kept."""
    rng = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_pretrained(base_path())
    data: list[Datum] = []
    for prompt in (rng.integers(0, VOCAB, 20), rng.integers(0, VOCAB, 9)):
        for _ in range(samples):
            tokens, logprobs, sets = [*prompt], [], []
            for _ in range(6):
                with torch.no_grad():
                    logits = model(torch.tensor([tokens])).logits[0, -1]
                kept = kept_by(logits.numpy(), way)
                p = (logits.double() / way.temperature)[kept].softmax(0).numpy()
                choice = rng.choice(len(kept), p=p)
                tokens.append(int(kept[choice]))
                logprobs.append(np.log(p[choice]))
                sets.append(kept)
            before = len(prompt) - 1
            inputs: dict[str, Any] = {
                "target_tokens": np.array(tokens[1:]),
                "logprobs": np.array([0.0] * before + logprobs, np.float32),
                "advantages": np.array([0.0] * before + [rng.normal()] * 6, np.float32),
            }
            if record:
                inputs["top_p_token_ids"] = np.concatenate(sets)
                inputs["top_p_token_offsets"] = np.cumsum([0] * (before + 1) + [len(each) for each in sets])
            data.append(Datum(np.array(tokens[:-1]), inputs))
    return data


@pytest.fixture(scope="module")
def fresh() -> dict[bool, list[Datum]]:
    return {record: sampled(3, WAY, record=record) for record in (False, True)}


@pytest.mark.parametrize("kind", ["adapter", "whole model"])
@pytest.mark.parametrize("record", [False, True], ids=["keys", "recorded tokens"])
def test_the_ratio_of_fresh_samples_is_one(fresh: dict[bool, list[Datum]], kind: str, record: bool) -> None:
    backend = make_backend() if kind == "adapter" else make_full()
    backend.create_model("m", spec() if kind == "adapter" else WHOLE)
    config = {"sampling_temperature": 0.7} if record else CONFIG
    (result,) = ok(backend.run([train("m", fresh[record], "ppo", **config)]))
    assert result.metrics["ratio:mean"] == pytest.approx(1, abs=1e-4)
    assert result.metrics["ratio:max"] == pytest.approx(1, abs=1e-3)
    assert result.metrics["outside_tokens:sum"] == 0
    for found, datum in zip(result.logprobs, fresh[record], strict=True):
        np.testing.assert_allclose(found[-6:], datum.loss_inputs["logprobs"][-6:], atol=2e-4)
    plain = [Datum(d.tokens, {k: v for k, v in d.loss_inputs.items() if "top_p" not in k}) for d in fresh[record]]
    (result,) = ok(backend.run([TrainingPass("m", plain, "ppo", backward=False)]))
    assert result.metrics["ratio:mean"] < 0.9
    assert "outside_tokens:sum" not in result.metrics


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"cross_entropy"}))
def test_every_loss_gets_the_logprobs_of_the_distribution(fresh: dict[bool, list[Datum]], loss: str) -> None:
    backend = make_backend()
    backend.create_model("m", spec())
    data = [
        Datum(
            d.tokens,
            {**d.loss_inputs, **({"sequence_ratio_mask": d.loss_inputs["advantages"]} if loss == "gspo" else {})},
        )
        for d in fresh[False]
    ]
    (result,) = ok(backend.run([train("m", data, loss, **CONFIG)]))
    assert result.metrics["ratio:mean"] == pytest.approx(1, abs=1e-4)


def test_targets_outside_count_where_they_are_trained() -> None:
    backend = make_backend()
    backend.create_model("m", spec())
    data = sft(5, 30, 20)
    (result,) = ok(backend.run([train("m", data, top_k=3)]))
    model = AutoModelForCausalLM.from_pretrained(base_path())
    expected, outside = [], 0
    for datum in data:
        with torch.no_grad():
            logits = model(torch.from_numpy(datum.tokens)[None]).logits[0]
        kept = [kept_by(row.numpy(), SampledFrom(top_k=3)) for row in logits]
        targets = datum.loss_inputs["target_tokens"]
        expected.append([float(expected_logprob(*each, 1.0)) for each in zip(logits, kept, targets, strict=True)])
        outside += sum(
            t not in own and w != 0 for own, t, w in zip(kept, targets, datum.loss_inputs["weights"], strict=True)
        )
    for found, own in zip(result.logprobs, expected, strict=True):
        np.testing.assert_allclose(found, own, atol=1e-4)
    assert result.metrics["outside_tokens:sum"] == outside > 20


@pytest.fixture(params=["adapter", "whole model"])
def one_and_two(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """Without ranks, and with two."""
    whole = request.param == "whole model"
    two = make_full(ranks=2) if whole else make_ranks(2, micro_batch_tokens=48)
    yield make_full() if whole else make_backend(micro_batch_tokens=48), two
    two.close()


def test_two_ranks_train_as_one_device_also_on_divided_sequences(
    one_and_two: tuple[Any, Any], tmp_path: Path, fresh: dict[bool, list[Datum]]
) -> None:
    long = rl(7, 150)[0]
    recorded = {"top_p_token_ids": np.tile(np.arange(40), 150), "top_p_token_offsets": np.arange(151) * 40}
    passes = [
        train("m", fresh[False], "importance_sampling", **CONFIG),
        train(
            "m", [*fresh[True], Datum(long.tokens, {**long.loss_inputs, **recorded})], "dro", sampling_temperature=0.7
        ),
    ]
    results = []
    for backend in one_and_two:
        backend.create_model("m", WHOLE if isinstance(backend, FullBackend) else spec())
        results.append(ok(backend.run(passes)))
    for ours, theirs in zip(*results, strict=True):
        for own, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-5)
        assert theirs.metrics["outside_tokens:sum"] == ours.metrics["outside_tokens:sum"]
        assert theirs.metrics["loss:sum"] == pytest.approx(ours.metrics["loss:sum"], rel=1e-5)
    assert results[0][1].metrics["outside_tokens:sum"] > 20
    gradients = [files_saved(backend, "m", tmp_path / str(number)) for number, backend in enumerate(one_and_two)]
    assert any(name.startswith("gradient.") for name in gradients[0])
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], atol=1e-5, rtol=1e-4)


def test_a_plain_pass_keeps_its_bits_beside_others_and_with_the_keys_off() -> None:
    data, other = grpo(0, 2, 4, 20), grpo(1, 2, 4, 20)
    results = []
    for passes in (
        [train("m", data, "ppo")],
        [train("m", data, "ppo", sampling_temperature=1.0, top_p=1.0, top_k=-1.0)],
        [train("m", data, "ppo"), train("m", other, "ppo", top_p=0.5, sampling_temperature=2.0)],
    ):
        backend = make_backend(merge=True)
        backend.create_model("m", spec())
        results.append(ok(backend.run(passes)))
    for later in results[1:]:
        for one, two in zip(results[0][0].logprobs, later[0].logprobs, strict=True):
            np.testing.assert_array_equal(one, two)
        assert later[0].metrics["loss:sum"] == results[0][0].metrics["loss:sum"]
    assert "outside_tokens:sum" not in results[2][0].metrics
    assert results[2][1].metrics["outside_tokens:sum"] > 0


@pytest.mark.parametrize("record", [False, True], ids=["keys", "recorded tokens"])
def test_the_unchanged_sdk_tells_what_it_sampled_from(fresh: dict[bool, list[Datum]], record: bool) -> None:
    """From the bytes that the SDK sends to the metrics, as the engine runs them."""
    backend, ratios = make_backend(), RatioCheck()
    backend.create_model("m", spec())
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(datum.tokens.tolist()),
            loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in datum.loss_inputs.items()},
        )
        for datum in fresh[record]
    ]

    def metrics(config: dict[str, float] | None) -> dict[str, float]:
        request = ForwardBackwardRequest(types.ForwardBackwardInput(data, "ppo", config), "m", 1)
        body = forward_backward_request_to_proto(request).SerializeToString()
        command = Command(1, "r", Kind.FORWARD, "t", "s", "m", 1, None, None, "proto", len(body))
        ((_, outcome),) = run_passes([command], {"r": body}, backend, PICTURES, LOSSES_STORED, ratios).outcomes
        return dict(pb.ForwardBackwardOutput.FromString(outcome.result).metrics)

    told = metrics({"sampling_temperature": 0.7} if record else CONFIG)
    assert told["ratio:mean"] == pytest.approx(1, abs=1e-4)
    assert NOTICE not in told
    ratios.updated("m")
    assert NOTICE in metrics({"sampling_temperature": 9.0} if record else None)


def _with(datum: Datum, **inputs: Any) -> Datum:
    return Datum(datum.tokens, {**datum.loss_inputs, **inputs})


IDS, ENDS = np.array([1, 2, 3]), np.array([0, 0, 2, 3])


@pytest.mark.parametrize(
    ("config", "inputs", "words"),
    [
        ({"sampling_temperature": 0.0}, {}, ["loss_fn_config.sampling_temperature", "0.01 to 100", "greedy"]),
        ({"sampling_temperature": float("nan")}, {}, ["loss_fn_config.sampling_temperature"]),
        ({"sampling_temperature": 1e3}, {}, ["loss_fn_config.sampling_temperature", "1000.0"]),
        ({"top_p": 0.0}, {}, ["loss_fn_config.top_p", "above 0"]),
        ({"top_p": 1.5}, {}, ["loss_fn_config.top_p", "1.5"]),
        ({"top_k": 2.5}, {}, ["loss_fn_config.top_k", "whole"]),
        ({"top_k": -2.0}, {}, ["loss_fn_config.top_k"]),
        ({"top_k": float("inf")}, {}, ["loss_fn_config.top_k"]),
        ({}, {"top_p_token_ids": IDS}, ["top_p_token_offsets: missing"]),
        ({}, {"top_p_token_offsets": ENDS}, ["top_p_token_ids: missing"]),
        ({"top_p": 0.5}, {"top_p_token_ids": IDS, "top_p_token_offsets": ENDS}, ["cannot be combined with top_p"]),
        ({}, {"top_p_token_ids": IDS + 96, "top_p_token_offsets": ENDS}, ["top_p_token_ids: token id 97", "[0, 97)"]),
        ({}, {"top_p_token_ids": IDS, "top_p_token_offsets": ENDS[:-1]}, ["top_p_token_offsets: must be 4 numbers"]),
        ({}, {"top_p_token_ids": IDS, "top_p_token_offsets": np.array([0, 3, 2, 3])}, ["do not fall"]),
        ({}, {"top_p_token_ids": IDS / 2, "top_p_token_offsets": ENDS}, ["top_p_token_ids: must be int64"]),
    ],
)  # fmt: skip
def test_what_no_sampler_does_is_refused_by_its_name(config: Any, inputs: Any, words: list[str]) -> None:
    backend = make_backend()
    backend.create_model("m", spec())
    with pytest.raises(InvalidRequest) as refusal:
        backend.check(train("m", [_with(sft(0, 3)[0], **inputs)], **config))
    assert all(word in str(refusal.value) for word in words), refusal.value
