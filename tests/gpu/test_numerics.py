"""bfloat16 training against float32 and against PEFT; packed attention; merged passes.

Bounds are relative: the distance of a result from float32 may be SLACK times the distance of a plain bfloat16
computation. The figures hold the measured distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.protocol import AdamParams, Datum, TrainingPass
from skyrl.trainer.ranks import lora_rank
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.gpu.figures import FIGURES
from tests.gpu.support import (
    ARCHITECTURES,
    DEVICE,
    NUMERICS,
    backend_on,
    build,
    distance,
    flat,
    gradient_of,
    logprobs_of,
    ok,
    stock,
    texts,
)
from tests.local_ranks import rank_of

SLACK = 1.5
"""Two bfloat16 computations of the same result round differently by chance."""
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
VOCAB = NUMERICS["vocab_size"]
LENGTHS = (200, 31, 1, 90, 128)
STEP = AdamParams(learning_rate=2e-3, eps=1e-8)


def _train(model_id: str, data: list[Datum]) -> TrainingPass:
    return TrainingPass(model_id, data, "cross_entropy")


def _start(path: str, directory: Path) -> Path:
    """The saved state of an adapter after two float32 steps, so that lora_B is not 0."""
    backend = backend_on(path, dtype=FLOAT32)
    backend.create_model("m", LoraSpec(8, 32.0, 3))
    for seed in range(2):
        ok(backend.run([_train("m", texts(seed, VOCAB, *LENGTHS))]))
        backend.optim_step("m", STEP)
    directory.mkdir()
    backend.save_state("m", directory)
    return directory


def _ours(path: str, start: Path, dtype: torch.dtype = BFLOAT16) -> LoraBackend:
    backend = backend_on(path, dtype=dtype)
    backend.create_model("m", LoraSpec(8, 32.0, 3))
    backend.load_state("m", start, optimizer=False)
    return backend


def _peft(path: str, start: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor]]:
    """The adapter in PEFT on the model of transformers, and its trainable float32 matrices by skyrl's names."""
    model: Any = PeftModel.from_pretrained(stock(path, dtype), str(start), is_trainable=True).eval()
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    short = {
        name.removeprefix("base_model.model.").replace(".default", "").removesuffix(".weight"): value
        for name, value in named.items()
    }
    assert all(value.dtype == FLOAT32 for value in short.values())
    return model, short


def _peft_loss(model: Any, data: list[Datum]) -> Tensor:
    loss = torch.zeros((), device=DEVICE)
    for datum in data:
        weights = torch.from_numpy(datum.loss_inputs["weights"]).to(DEVICE)
        loss = loss - (weights * logprobs_of(model, datum)).sum()
    return loss


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_are_as_close_to_float32_as_those_of_peft(architecture: str, bases: Path, tmp_path: Path) -> None:
    path = build(ARCHITECTURES[architecture], bases)
    start = _start(path, tmp_path / "start")
    data = texts(9, VOCAB, *LENGTHS)
    gradients: dict[torch.dtype, dict[str, Tensor]] = {}
    for dtype in (FLOAT32, BFLOAT16):
        model, named = _peft(path, start, dtype)
        _peft_loss(model, data).backward()
        gradients[dtype] = {name: value.grad.cpu() for name, value in named.items() if value.grad is not None}
    errors = {}
    for dtype in (FLOAT32, BFLOAT16):
        backend = _ours(path, start, dtype)
        ok(backend.run([_train("m", data)]))
        errors[dtype] = distance(gradient_of(backend, "m", tmp_path / str(dtype)), gradients[FLOAT32])
    peft = distance(gradients[BFLOAT16], gradients[FLOAT32])
    FIGURES.record(f"{architecture}: gradient's distance from float32", peft, "beside")
    FIGURES.record(f"{architecture}: gradient's distance from float32", errors[BFLOAT16])
    assert errors[FLOAT32] < 1e-4
    assert 1e-4 < peft < 0.3
    assert errors[BFLOAT16] < SLACK * peft


def test_losses_of_a_training_run_stay_as_close_to_float32_as_those_of_peft(bases: Path, tmp_path: Path) -> None:
    """Twelve steps on one text; the loss of each step is compared with PEFT in float32 and in bfloat16."""
    path = build(NUMERICS, bases)
    start = _start(path, tmp_path / "start")
    data = texts(5, VOCAB, *LENGTHS)
    losses: dict[str, list[float]] = {}
    for name, dtype in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        model, named = _peft(path, start, dtype)
        optimizer = torch.optim.AdamW(list(named.values()), lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        losses[name] = []
        for _ in range(12):
            loss = _peft_loss(model, data)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(float(loss.detach()))
    backend = _ours(path, start)
    losses["ours"] = []
    for _ in range(12):
        (result,) = ok(backend.run([_train("m", data)]))
        losses["ours"].append(result.metrics["loss:sum"])
        backend.optim_step("m", STEP)
    differences = {
        name: max(abs(one - exact) / exact for one, exact in zip(losses[name], losses["float32"], strict=True))
        for name in ("bfloat16", "ours")
    }
    what = "12 steps: greatest relative difference of the loss from float32"
    FIGURES.record(what, differences["bfloat16"], "beside")
    FIGURES.record(what, differences["ours"])
    assert losses["ours"][-1] < 0.8 * losses["ours"][0]
    assert differences["ours"] < SLACK * differences["bfloat16"] + 5e-3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_attention_agrees_with_transformers(architecture: str, bases: Path) -> None:
    """Sequences packed into one row, some padded in a group, are compared with one sequence at a time."""
    path = build(ARCHITECTURES[architecture], bases)
    data = texts(4, VOCAB, 300, 7, 255, 64, 60, 1)
    with torch.no_grad():
        exact = torch.cat([logprobs_of(stock(path, FLOAT32), datum) for datum in data]).cpu()
        rounded = torch.cat([logprobs_of(stock(path, BFLOAT16), datum) for datum in data]).cpu()
    logprobs = {}
    for dtype in (FLOAT32, BFLOAT16):
        backend = backend_on(path, dtype=dtype)
        backend.create_model("m", LoraSpec(8, 32.0, 0))
        (result,) = ok(backend.run([TrainingPass("m", data, "cross_entropy", backward=False)]))
        logprobs[dtype] = flat(result)
    stock_error, packed_error = (float((one - exact).square().mean().sqrt()) for one in (rounded, logprobs[BFLOAT16]))
    FIGURES.record(f"{architecture}: logprobs' distance from float32 (RMS)", stock_error, "beside")
    FIGURES.record(f"{architecture}: logprobs' distance from float32 (RMS)", packed_error)
    torch.testing.assert_close(logprobs[FLOAT32], exact, atol=2e-4, rtol=1e-4)
    assert stock_error > 1e-4
    assert packed_error < SLACK * stock_error


def _after_a_step(backend: LoraBackend, ranks: Sequence[int]) -> None:
    """Gives the backend a model `r<rank>` of each rank, with lora_B that is not 0."""
    for rank in ranks:
        backend.create_model(f"r{rank}", LoraSpec(rank, 32.0, rank))
        ok(backend.run([_train(f"r{rank}", texts(rank, VOCAB, 30))]))
        backend.optim_step(f"r{rank}", AdamParams(learning_rate=1e-3, eps=1e-3))


def test_merged_passes_are_as_close_to_float32_as_separate_ones(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of rank 1, 8 and 32 with two passes each share micro-batches, and grouped products: a CPU takes them for
    this test."""
    monkeypatch.setattr(lora_rank, "groups_adapters", lambda device: True)
    path = build(NUMERICS, bases)
    ranks = (1, 8, 32)
    queue = [
        _train(f"r{rank}", texts(10 * rank + number, VOCAB, *lengths))
        for number, lengths in enumerate([(40, 9, 200), (17, 64)])
        for rank in ranks
    ]
    logprobs: dict[str, list[Tensor]] = {}
    gradients: dict[str, dict[int, dict[str, Tensor]]] = {}
    kinds = {
        "exact": (FLOAT32, False),
        "alone": (BFLOAT16, False),
        "again": (BFLOAT16, False),
        "merged": (BFLOAT16, True),
    }
    for name, (dtype, merge) in kinds.items():
        backend = backend_on(path, dtype=dtype, merge=merge, budget=512)
        _after_a_step(backend, ranks)
        logprobs[name] = [flat(result) for result in ok(backend.run(queue))]
        gradients[name] = {rank: gradient_of(backend, f"r{rank}", tmp_path / name / str(rank)) for rank in ranks}
    same = all(torch.equal(one, other) for one, other in zip(logprobs["alone"], logprobs["again"], strict=True))
    same &= all(distance(gradients["again"][rank], gradients["alone"][rank]) == 0 for rank in ranks)
    FIGURES.record("passes alone, run twice: the same bits", same)
    assert same or DEVICE == "cuda"
    for rank in ranks:
        alone, merged = (distance(gradients[name][rank], gradients["exact"][rank]) for name in ("alone", "merged"))
        FIGURES.record(f"rank {rank}: gradient's distance from float32", alone)
        FIGURES.record(f"rank {rank}: gradient's distance from float32", merged, "merged")
        assert 1e-4 < alone < 0.3
        assert merged < SLACK * alone
    pairs = [torch.cat(logprobs[name]) - torch.cat(logprobs["exact"]) for name in ("alone", "merged")]
    alone, merged = (float(error.square().mean().sqrt()) for error in pairs)
    FIGURES.record("ranks 1, 8, 32: logprobs' distance from float32 (RMS)", alone)
    FIGURES.record("ranks 1, 8, 32: logprobs' distance from float32 (RMS)", merged, "merged")
    assert merged < SLACK * alone


@pytest.mark.parametrize("broken", [1, 32])
def test_weights_that_are_not_finite_do_not_reach_models_in_the_same_grouped_products(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """Models of rank 1, 8 and 32, padded to rank 32. One has no finite weights."""
    monkeypatch.setattr(lora_rank, "groups_adapters", lambda device: True)
    ranks = (1, 8, 32)
    others = [rank for rank in ranks if rank != broken]
    queue = [_train(f"r{rank}", texts(rank, VOCAB, 40, 9)) for rank in ranks]
    gradients: dict[str, list[dict[str, Tensor]]] = {}
    for name in ("sound", "broken"):
        backend = backend_on(build(NUMERICS, bases), merge=True)
        _after_a_step(backend, ranks)
        if name == "broken":
            rank_of(backend).adapters[f"r{broken}"].weights.fill_(torch.nan)
        results = backend.run(queue)
        assert [isinstance(each, Exception) for each in results] == [name == "broken" and r == broken for r in ranks]
        gradients[name] = [gradient_of(backend, f"r{rank}", tmp_path / name / str(rank)) for rank in others]
    for found, right in zip(gradients["broken"], gradients["sound"], strict=True):
        assert distance(found, right) < 1e-3
