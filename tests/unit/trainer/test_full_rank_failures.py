"""Full fine-tuning on ranks that run out of memory, and models that end; the arithmetic of GPUs, tried on CPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch_lora_support import assert_same, base_path, files_saved, make_full, ok, rl, sft, stored_tensors, train

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.losses import Loss, LossInputs, LossValue
from skyrl.trainer.model import base_model as model_module
from skyrl.trainer.protocol import AdamParams, Datum, InvalidRequest, OutOfMemory, PassResult
from skyrl.trainer.ranks import full_backend, plan, sharded_model
from skyrl.trainer.ranks import full_rank as rank_module
from skyrl.trainer.ranks import rank as base_module
from skyrl.trainer.ranks.full_rank import FullRank
from skyrl.trainer.ranks.rank import RankSettings
from skyrl.trainer.rows.prefixes import PrefixTree, prefix_tree
from tests.local_ranks import rank_of

WHOLE = LoraSpec(rank=0, alpha=32.0, seed=0)
STEP = AdamParams(learning_rate=1e-2)
Make = Callable[..., Any]


class NoMemoryOnRankOne(FullRank):
    """Every second action of `methods` that needs memory, and that the ranks agree on, finds none on rank 1."""

    methods: tuple[str, ...] = ("create", "_begin", "_agreed", "begin_load", "end_load")

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        super().__init__(rank, ranks, settings)
        modules: tuple[Any, ...] = (rank_module, base_module)
        agreed, calls = modules[0].on_all_or_none, []

        def attempt(action: Callable[[], Any], device: torch.device) -> Any:
            if sys._getframe(1).f_code.co_name not in self.methods:
                return agreed(action, device)
            calls.append(1)

            def without_memory() -> Any:
                action()
                raise torch.OutOfMemoryError("no memory left")

            return agreed(without_memory if rank == 1 and len(calls) % 2 else action, device)

        for module in modules:
            module.on_all_or_none = attempt


class NoMemoryToSaveOnRankOne(NoMemoryOnRankOne):
    methods = ("is_finite", "read_part")


def _broken_loss(lp: Tensor, inputs: LossInputs, config: object) -> LossValue:
    raise RuntimeError("this loss fails on rank 1")


class LossFailsOnRankOne(FullRank):
    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        super().__init__(rank, ranks, settings)
        if rank == 1:
            self._losses["importance_sampling"] = Loss(_broken_loss, ("logprobs", "advantages"))


class ComputesInBfloat16(FullRank):
    """Has the dtypes of a rank with a GPU, on a CPU."""

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        super().__init__(rank, ranks, settings)
        modules: tuple[Any, ...] = (sharded_model, model_module)
        for module in modules:
            module.base_dtype = lambda device: torch.bfloat16


@pytest.fixture
def make() -> Iterator[Make]:
    """A backend with ranks; closed at the test's end."""
    made: list[Any] = []

    def full(rank_class: type[FullRank] = FullRank, *, ranks: int | None = 2) -> Any:
        made.append(make_full("qwen3", ranks, rank_class=rank_class))
        return made[-1]

    yield full
    for backend in made:
        backend.close()


def test_memory_that_runs_out_on_one_rank_changes_nothing_on_any(make: Make, tmp_path: Path) -> None:
    short, steady = make(NoMemoryOnRankOne), make()
    with pytest.raises(OutOfMemory):
        short.create_model("m", WHOLE)
    for backend in (short, steady):
        backend.create_model("m", WHOLE)
    data = train("m", sft(1, 20, 9))
    (outcome,) = short.run([data])
    assert isinstance(outcome, OutOfMemory)
    for backend in (short, steady):
        ok(backend.run([data]))
    before = files_saved(short, "m", tmp_path / "before")
    with pytest.raises(OutOfMemory):
        short.optim_step("m", STEP)
    for _ in ("at its end", "at its beginning"):
        with pytest.raises(OutOfMemory):
            short.load_state("m", tmp_path / "before", optimizer=True)
        assert_same(files_saved(short, "m", tmp_path / f"after {_}"), before)
    for backend in (short, steady):
        assert backend.optim_step("m", STEP)["optimizer_step"] == 1
    assert_same(files_saved(short, "m", tmp_path / "short"), files_saved(steady, "m", tmp_path / "steady"))


def test_a_save_without_memory_on_one_rank_fails_alone(make: Make, tmp_path: Path) -> None:
    backend = make(NoMemoryToSaveOnRankOne)
    backend.create_model("m", WHOLE)
    with pytest.raises(OutOfMemory):
        backend.save_adapter("m", tmp_path)  # the check whether all weights are finite
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    backend.save_state("m", tmp_path / "first")
    with pytest.raises(OutOfMemory):
        backend.save_state("m", tmp_path / "second")
    ok(backend.run([train("m", sft(1, 20, 9))]))
    assert backend.optim_step("m", STEP)["optimizer_step"] == 1


def test_a_loss_that_raises_on_one_rank_fails_its_pass_alone(make: Make, tmp_path: Path) -> None:
    broken, whole = make(LossFailsOnRankOne), make()
    good, bad = train("m", rl(1, 30, 30, 30), "ppo"), train("m", rl(2, 30, 30, 30), "importance_sampling")
    for backend in (broken, whole):
        backend.create_model("m", WHOLE)
    outcomes = broken.run([good, bad, good])
    assert [type(each) for each in outcomes] == [PassResult, RuntimeError, PassResult]
    assert "this loss fails on rank 1" in str(outcomes[1])
    ok(whole.run([good, good]))
    assert_same(files_saved(broken, "m", tmp_path / "broken"), files_saved(whole, "m", tmp_path / "whole"))


def test_no_memory_for_the_prefixes_of_a_pass_fails_that_pass_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    backend.create_model("m", WHOLE)
    good, bad = train("m", sft(0, 9, 20)), train("m", rl(1, 30, 9), "ppo")

    def short(data: Sequence[Datum]) -> PrefixTree:
        if data is bad.data:
            raise MemoryError("no memory left")
        return prefix_tree(data)

    monkeypatch.setattr(plan, "prefix_tree", short)
    assert [type(each) for each in backend.run([good, bad, good])] == [PassResult, OutOfMemory, PassResult]


def test_a_model_that_is_deleted_in_the_middle_of_a_save_fails_the_save_alone(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_backend, "PAGE", 5000)
    backend = make()
    backend.create_model("m", WHOLE)
    ok(backend.run([train("m", sft(1, 20, 9))]))
    backend.optim_step("m", STEP)
    call, calls = backend.group.call, []

    def call_and_delete(method: str, *arguments: Any) -> list[Any]:
        calls.append(method)
        if calls.count("read_part") == 3 and "delete" not in calls:
            backend.delete_model("m")
            backend.create_model("n", WHOLE)
        return call(method, *arguments)

    monkeypatch.setattr(backend.group, "call", call_and_delete)
    with pytest.raises(InvalidRequest, match="there is no model m"):
        backend.save_adapter("m", tmp_path)
    (tmp_path / "n").mkdir()
    backend.save_state("n", tmp_path / "n")
    assert_same(stored_tensors(tmp_path / "n"), stored_tensors(Path(base_path())))


def test_weights_that_are_not_finite_on_one_rank_are_not_exported(make: Make, tmp_path: Path) -> None:
    backend = make()
    backend.create_model("m", WHOLE)
    weights = files_saved(backend, "m", tmp_path / "state")
    weights["lm_head.weight"][-1, 0] = float("inf")
    save_file(weights, tmp_path / "state" / "model.safetensors")
    backend.load_state("m", tmp_path / "state", optimizer=False)
    with pytest.raises(FloatingPointError, match="hold NaN or infinity"):
        backend.save_adapter("m", tmp_path)


@pytest.mark.parametrize("ranks", [None, 2], ids=["alone", "ranks"])
def test_computing_in_bfloat16_keeps_float32_weights_and_gradients(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int | None
) -> None:
    """Small steps add up, which they would not do in bfloat16."""
    with monkeypatch.context() as patched:
        if ranks is None:  # the rank is in this process
            for module in (sharded_model, model_module):
                patched.setattr(module, "base_dtype", lambda device: torch.bfloat16)
        rounded = make(ComputesInBfloat16, ranks=ranks)
    exact = make(ranks=ranks)
    data = train("m", sft(1, 20, 9, 30))
    losses = []
    for backend in (rounded, exact):
        backend.create_model("m", WHOLE)
        for _ in range(3):
            ok(backend.run([data]))
            backend.optim_step("m", AdamParams(learning_rate=1e-5, eps=1e-3))
        losses.append(ok(backend.run([data]))[0].metrics["loss:sum"])
    if ranks is None:
        rank = rank_of(rounded)
        assert {each.dtype for each in rank.base.packed.parameters()} == {torch.bfloat16}
        assert rank.memory()["weights"] == 4 * rank.parameters("m").numel
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02, abs=0.5)
    states = [files_saved(each, "m", tmp_path / str(number)) for number, each in enumerate((rounded, exact))]
    base = stored_tensors(Path(base_path()))
    for name, value in states[0].items():
        expected = states[1][name]
        assert value.dtype == torch.float32
        if name in base:
            moved, expected_move = value - base[name], expected - base[name]
            assert moved.abs().max() < 4e-5
            assert torch.nn.functional.cosine_similarity(moved.flatten(), expected_move.flatten(), dim=0) > 0.9, name
        elif name.startswith("gradient"):
            assert torch.nn.functional.cosine_similarity(value.flatten(), expected.flatten(), dim=0) > 0.99, name
            assert not torch.equal(value, value.bfloat16().float()), "gradients are summed in float32"
