"""Full fine-tuning on several ranks against one device: numbers, bits, files, and memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_support import (
    STEP,
    TOLERANCE,
    Run,
    assert_close_results,
    assert_same_results,
    closed_at_end,
    uneven_passes,
)
from safetensors import SafetensorError
from torch_lora_support import (
    assert_close,
    assert_same,
    base_path,
    files_saved,
    make_backend,
    make_full,
    ok,
    overflowing,
    rl,
    sft,
    spec,
    stored_tensors,
    train,
)
from transformers import AutoModelForCausalLM

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.protocol import Backend, InvalidRequest, PassResult, PlaceTaken, TrainingPass
from skyrl.trainer.ranks import full_backend
from skyrl.trainer.ranks.full_backend import FullBackend

WHOLE = LoraSpec(rank=0, alpha=32.0, seed=0)
STEPS = 2
Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """`make_full`; closes the backends at the end."""
    with closed_at_end(make_full) as made:
        yield made


def _passes(step: int) -> list[TrainingPass]:
    return uneven_passes("m", 100 * step)


def _learn(backend: Any, directory: Path) -> Run:
    """Steps, and then passes whose gradient waits; returns results, metrics of steps, and all saved tensors."""
    results: list[PassResult] = []
    metrics: list[dict[str, float]] = []
    backend.create_model("m", WHOLE)
    for step in range(STEPS):
        results += ok(backend.run(_passes(step)))
        metrics.append(backend.optim_step("m", STEP))
    results += ok(backend.run(_passes(STEPS)))
    return results, metrics, files_saved(backend, "m", directory)


def _assert_close(one: Run, other: Run) -> None:
    assert_close_results(one, other)
    assert {"exp_avg", "exp_avg_sq", "gradient", "model"} <= {name.partition(".")[0] for name in one[2]}
    assert_close(one[2], other[2], TOLERANCE)


def _assert_same(one: Run, other: Run) -> None:
    assert_same_results(one, other)
    assert_same(one[2], other[2])


@pytest.mark.parametrize(
    ("architecture", "ranks", "options"),
    [
        pytest.param("qwen3", 2, {}, marks=pytest.mark.slow),
        ("qwen3", 3, {"gradient_checkpointing": True}),
        pytest.param("qwen3-tied", 3, {}, marks=pytest.mark.slow),
        ("qwen3-tied", 2, {"gradient_checkpointing": True}),
        ("qwen2-window", 3, {}),
        ("empty-shards", 3, {}),
        pytest.param("llama", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_train_as_one_device_does(
    tmp_path: Path, make: Make, architecture: str, ranks: int, options: dict[str, bool]
) -> None:
    """The 97 rows of the embeddings are divisible by neither number of ranks."""
    expected = _learn(make(architecture), tmp_path / "one")
    _assert_close(_learn(make(architecture, ranks, **options), tmp_path / "ranks"), expected)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-tied"])
def test_one_rank_gives_the_bits_of_one_device(tmp_path: Path, make: Make, architecture: str) -> None:
    _assert_same(_learn(make(architecture, 1), tmp_path / "rank"), _learn(make(architecture), tmp_path / "one"))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_same_number_of_ranks_gives_the_same_bits_again(tmp_path: Path, make: Make, ranks: int) -> None:
    backend = make("qwen3", ranks)
    assert backend.repeats_exactly
    first = _learn(backend, tmp_path / "first")
    backend.delete_model("m")
    _assert_same(_learn(backend, tmp_path / "again"), first)


def _stored(backend: Backend, directory: Path) -> dict[str, bytes]:
    """All files that a backend writes of a model, by name."""
    for name in ("state", "own", "rounded"):
        (directory / name).mkdir(parents=True)
    backend.save_state("m", directory / "state")
    backend.save_adapter("m", directory / "own")
    backend.save_adapter("m", directory / "rounded", dtype="bfloat16")
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*.*")}


@pytest.mark.parametrize("architecture", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3-tied"])
def test_a_state_of_two_ranks_goes_on_with_any_number_and_without_ranks(
    tmp_path: Path, make: Make, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All write the same files, byte for byte, also in many pages that cut tensors."""
    monkeypatch.setattr(full_backend, "PAGE", 5000)
    two = make(architecture, 2)
    _learn(two, tmp_path / "learned")
    (tmp_path / "state").mkdir()
    two.save_snapshot("m", tmp_path / "state")
    files = _stored(two, tmp_path / "two")
    assert {"state/state.json", "state/optimizer-00001.safetensors", "own/model.safetensors"} <= files.keys()
    after = []
    for number, backend in enumerate((make(architecture), make(architecture, 1), make(architecture, 3), two)):
        if backend is two:
            backend.delete_model("m")
        backend.restore_model("m", WHOLE, tmp_path / "state")
        assert _stored(backend, tmp_path / f"restored{number}") == files
        ok(backend.run(_passes(9)))
        assert backend.optim_step("m", STEP)["optimizer_step"] == STEPS + 1
        ok(backend.run(_passes(10)))
        after.append(files_saved(backend, "m", tmp_path / f"after{number}"))
    undisturbed = make(architecture, 2)
    _learn(undisturbed, tmp_path / "undisturbed")
    ok(undisturbed.run(_passes(9)))
    undisturbed.optim_step("m", STEP)
    ok(undisturbed.run(_passes(10)))
    assert_same(after[3], files_saved(undisturbed, "m", tmp_path / "end"))
    for state in after:
        assert_close(state, after[3], TOLERANCE)


def test_ranks_write_and_read_states_in_many_files(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, three = make("qwen3"), make("qwen3", 3)
    for backend in (one, three):
        backend.create_model("m", WHOLE)
    ok(one.run(_passes(1)))
    one.optim_step("m", STEP)
    (tmp_path / "whole").mkdir()
    one.save_state("m", tmp_path / "whole")
    three.load_state("m", tmp_path / "whole", optimizer=True)
    (tmp_path / "parts").mkdir()
    three._state.save_state("m", tmp_path / "parts", 20_000)
    names = {file.name for file in (tmp_path / "parts").iterdir()}
    assert "model.safetensors.index.json" in names
    assert len([name for name in names if name.startswith("optimizer-")]) > 4
    assert_same(stored_tensors(tmp_path / "parts"), stored_tensors(tmp_path / "whole"))
    before = files_saved(three, "m", tmp_path / "before")
    for backend in (one, three):
        backend.load_state("m", tmp_path / "parts", optimizer=False)
        assert not any("exp_avg" in name for name in files_saved(backend, "m", tmp_path / f"{id(backend)}"))
        backend.load_state("m", tmp_path / "parts", optimizer=True)
        assert_same(files_saved(backend, "m", tmp_path / f"again-{id(backend)}"), before)


def test_transformers_load_what_ranks_export_and_give_the_same_logprobs(tmp_path: Path, make: Make) -> None:
    backend = make("qwen3-tied", 2)
    backend.create_model("m", WHOLE)
    ok(backend.run(_passes(1)))
    backend.optim_step("m", STEP)
    backend.save_adapter("m", tmp_path)
    data = sft(3, 7, 21)
    (result,) = ok(backend.run([TrainingPass("m", data, "cross_entropy", backward=False)]))
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        logits = stock(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0].detach()
        targets = torch.from_numpy(datum.loss_inputs["target_tokens"])[:, None]
        np.testing.assert_allclose(logprobs, logits.log_softmax(-1).gather(1, targets)[:, 0], atol=2e-5)
    base = stored_tensors(Path(base_path("qwen3-tied")))
    assert {name: one.shape for name, one in stored_tensors(tmp_path).items()} == {
        name: one.shape for name, one in base.items()
    }


def test_all_that_is_trained_is_divided_by_the_number_of_ranks(make: Make) -> None:
    parameters = sum(one.numel() for one in stored_tensors(Path(base_path())).values())
    for ranks in (1, 2, 3):
        backend = make("qwen3", ranks)
        backend.create_model("m", WHOLE)
        ok(backend.run(_passes(1)))
        backend.optim_step("m", STEP)
        ok(backend.run(_passes(2)))
        held = backend.group.call("memory")
        for part, size in (("weights", 4), ("gradient", 4), ("moments", 8)):
            assert sum(each[part] for each in held) == size * parameters
            assert max(each[part] for each in held) < 1.02 * size * parameters / ranks, "97 rows are not divisible"


def test_a_pass_that_fails_on_one_rank_adds_no_gradient_on_any(tmp_path: Path, make: Make) -> None:
    """One of the pass's sequences, and so one rank, has the infinite ratio."""
    bad = rl(1, 20, 20, 20)
    bad[1].loss_inputs["logprobs"] = np.full(20, -1e6, np.float32)
    good = train("m", sft(2, 9, 30, 4))
    backends = [make("qwen3", 3), make("qwen3", 3)]
    for backend in backends:
        backend.create_model("m", WHOLE)
    first, failed, third = backends[0].run([good, train("m", bad, "importance_sampling"), good])
    assert "the sum of importance_sampling is inf, no gradient was kept" in str(failed)
    ok([first, third])
    ok(backends[1].run([good, good]))
    disturbed, steady = (files_saved(each, "m", tmp_path / str(n)) for n, each in enumerate(backends))
    assert_same(disturbed, steady)


def test_a_gradient_that_is_not_finite_makes_no_step(tmp_path: Path, make: Make) -> None:
    backend = make("qwen3", 2)
    backend.create_model("m", WHOLE)
    before = files_saved(backend, "m", tmp_path / "before")
    data = overflowing()
    ok(backend.run([train("m", data, "importance_sampling")]))
    with pytest.raises(FloatingPointError, match="norm inf"):
        backend.optim_step("m", STEP)
    assert_same(files_saved(backend, "m", tmp_path / "after"), before)
    assert backend.optim_step("m", STEP) == {}


def test_one_model_is_trained_at_a_time_and_the_next_begins_with_the_base_models_weights(
    tmp_path: Path, make: Make
) -> None:
    backend: FullBackend = make("qwen3", 2)
    with pytest.raises(InvalidRequest, match="must be 0, got 8"):
        backend.create_model("m", spec(8))
    backend.create_model("m", WHOLE)
    with pytest.raises(PlaceTaken):
        backend.create_model("n", WHOLE)
    with pytest.raises(InvalidRequest, match="m exists already"):
        backend.create_model("m", WHOLE)
    ok(backend.run(_passes(1)))
    backend.optim_step("m", STEP)
    backend.clear_gradient("m")
    backend.delete_model("other")
    backend.delete_model("m")
    for call in (lambda: backend.optim_step("m", STEP), lambda: backend.save_state("m", tmp_path)):
        with pytest.raises(InvalidRequest, match="there is no model m"):
            call()
    backend.create_model("n", WHOLE)
    (tmp_path / "n").mkdir()
    backend.save_state("n", tmp_path / "n")
    assert_same(stored_tensors(tmp_path / "n"), stored_tensors(Path(base_path())))


@pytest.mark.parametrize("damage", ["adapter", "shorter", "missing", "other shape", "optimizer", "state.json"])
def test_a_load_that_fails_changes_nothing_on_any_rank(tmp_path: Path, make: Make, damage: str) -> None:
    backend = make("qwen3", 2)
    backend.create_model("m", WHOLE)
    ok(backend.run(_passes(1)))
    backend.optim_step("m", STEP)
    (bad := tmp_path / "bad").mkdir()
    backend.save_state("m", bad)
    ok(backend.run(_passes(2)))
    now = files_saved(backend, "m", tmp_path / "now")
    weights, optimizer = bad / "model.safetensors", bad / "optimizer-00001.safetensors"
    match damage:
        case "adapter":
            adapters = make_backend()
            adapters.create_model("a", spec(8))
            adapters.save_state("a", bad)
        case "shorter":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "missing":
            weights.unlink()
        case "other shape":
            other = make("qwen3-tied")
            other.create_model("m", WHOLE)
            other.save_state("m", bad)
        case "optimizer":
            optimizer.write_bytes(weights.read_bytes())
        case _:
            (bad / "state.json").write_text(json.dumps({"kind": "full", "format": 99}))
    expected = InvalidRequest if damage == "adapter" else (OSError, ValueError, SafetensorError)
    with pytest.raises(expected):
        backend.load_state("m", bad, optimizer=True)
    assert_same(files_saved(backend, "m", tmp_path / "after"), now)


def test_a_probe_on_ranks_is_the_base_model_as_it_was_loaded(make: Make) -> None:
    forward = TrainingPass("m", sft(5, 24), "cross_entropy", backward=False)
    results = []
    for backend in (make(), make(ranks=2)):
        backend.create_probe("m", WHOLE)
        (probe,) = ok(backend.run([forward]))
        backend.delete_model("m")
        backend.create_model("m", WHOLE)
        (created,) = ok(backend.run([forward]))
        results += [probe.logprobs[0], created.logprobs[0]]
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=TOLERANCE, atol=TOLERANCE)
