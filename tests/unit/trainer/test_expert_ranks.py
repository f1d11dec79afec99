"""Experts over ranks: each rank holds some experts of every layer, against one device and ranks that gather experts."""

from __future__ import annotations

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
    assert_close_runs,
    assert_same_runs,
    closed_at_end,
    learn_together,
    uneven_passes,
)
from torch_lora_support import (
    assert_close,
    assert_same,
    base_path,
    make_backend,
    make_ranks,
    ok,
    overflowing,
    rl,
    saved,
    sft,
    spec,
    train,
    with_experts,
)

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.trainer.protocol import InvalidRequest, PassResult, RankDied, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.ranks.lora_rank import ExpertRank
from tests.families import MIXTURES, make_family
from tests.quantized import MXFP4, mxfp4, quantize

SPECS = {
    "all": spec(8, 1),
    "experts": spec(3, 2, train_attn=False, train_unembed=False),
    "attention": spec(4, 3, train_mlp=False),
}
LAYERS = 2
OF_WEIGHTS = 5 * TOLERANCE
"""After one step lora_B is small, so its rounding is a larger part of it: up to 1e-5 with ranks that gather experts."""
Make = Callable[..., LoraBackend]


def make_divided(ranks: int, architecture: str = "mixture", **options: Any) -> LoraBackend:
    placed = {"placement.expert_parallel": True, "placement.policy_num_cpu_ranks": max(2, ranks)}
    return make_ranks(ranks, architecture, **{"rank_class": ExpertRank, **placed, **options})


@pytest.fixture
def divided() -> Iterator[Make]:
    """`make_divided`; closes the backends at the end."""
    with closed_at_end(make_divided) as make:
        yield make


@pytest.fixture
def gathering() -> Iterator[Make]:
    with closed_at_end(make_ranks) as make:
        yield make


def _passes(model_id: str, step: int) -> list[TrainingPass]:
    """Uneven passes, and one with recorded experts."""
    seed = 100 * step + list(SPECS).index(model_id)
    return [*uneven_passes(model_id, seed), train(model_id, with_experts(sft(seed + 40, 20, 9, 30), seed))]


def _learn(backend: Any, directory: Path, model_ids: tuple[str, ...] = tuple(SPECS)) -> Run:
    return learn_together(backend, directory, {each: SPECS[each] for each in model_ids}, _passes, steps=1)


def _assert_close(one: Run, other: Run) -> None:
    assert_close_runs(one, other, of_weights=OF_WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "settings"),
    [(2, {}), (3, {}), (3, {"merge": True}), (3, {"gradient_checkpointing": True})],
    ids=["two", "three", "merged", "recomputed"],
)
def test_ranks_that_hold_experts_train_as_one_device_does(
    tmp_path: Path, divided: Make, count: int, settings: dict[str, bool]
) -> None:
    expected = _learn(make_backend("mixture", micro_batch_tokens=48), tmp_path / "one")
    _assert_close(_learn(divided(count, **settings), tmp_path / "ranks"), expected)


class Together(ExpertRank):
    """Computes the entries of all ranks in the same products, as on GPUs."""

    def load(self) -> Any:
        facts = super().load()
        assert self._model.exchange is not None
        self._model.exchange.together = True
        return facts


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True])
def test_entries_of_all_ranks_computed_together_differ_by_rounding(tmp_path: Path, divided: Make, merge: bool) -> None:
    expected = _learn(make_backend("mixture", micro_batch_tokens=48), tmp_path / "one")
    _assert_close(_learn(divided(3, rank_class=Together, merge=merge), tmp_path / "ranks"), expected)


@pytest.mark.parametrize(
    ("count", "merge"),
    [(2, True), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(3, False, marks=pytest.mark.slow)],
)
def test_passes_have_the_bits_of_ranks_that_gather_experts(
    tmp_path: Path, divided: Make, gathering: Make, count: int, merge: bool
) -> None:
    """Losses, logprobs and gradients; also where adapters share micro-batches."""
    runs: list[Run] = []
    for number, make in enumerate((divided, gathering)):
        backend = make(count, "mixture-of-wide-experts", merge=merge, micro_batch_tokens=96)
        for model_id, each in SPECS.items():
            backend.create_model(model_id, each)
        results = ok(backend.run([each for model_id in SPECS for each in _passes(model_id, 0)]))
        runs.append((results, [], {m: saved(backend, m, tmp_path / f"{number}-{m}") for m in SPECS}))
    assert_same_runs(runs[0], runs[1])


def _long_passes(model_id: str, step: int) -> list[TrainingPass]:
    """Long sequences alone and beside short ones, with recorded experts, and a forward."""
    return [
        train(model_id, sft(step + 1, 101)),
        train(model_id, with_experts(sft(step + 2, 7, 90, 12, 60, 31), step)),
        TrainingPass(model_id, sft(step + 4, 55, 20), "cross_entropy", backward=False),
    ]


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (3, {"gradient_checkpointing": True}),
        pytest.param(2, {"merge": True}, marks=pytest.mark.slow),
        pytest.param(2, {"rank_class": Together}, marks=pytest.mark.slow),
    ],
    ids=["three", "merged", "together"],
)
def test_rows_of_a_divided_sequence_travel_to_their_experts(
    tmp_path: Path, divided: Make, count: int, settings: dict[str, Any]
) -> None:
    specs = {"all": SPECS["all"], "experts": SPECS["experts"]}
    one, ranks = make_backend("mixture", micro_batch_tokens=48), divided(count, context_parallel_tokens=48, **settings)
    runs: list[Run] = []
    for name, backend in (("one", one), ("ranks", ranks), ("again", ranks)):
        runs.append(learn_together(backend, tmp_path / name, specs, _long_passes, steps=1))
        for model_id in specs:
            backend.delete_model(model_id)
    expected, found, again = runs
    _assert_close(found, expected)
    assert_same_runs(again, found)


@pytest.mark.slow
def test_the_same_number_of_ranks_gives_the_same_bits_again_also_beside_other_models(
    tmp_path: Path, divided: Make
) -> None:
    together, again = (_learn(divided(3), tmp_path / name) for name in ("together", "again"))
    assert_same_runs(again, together)
    alone = divided(3)
    assert alone.repeats_exactly
    for number, model_id in enumerate(SPECS):
        one = _learn(alone, tmp_path / "alone", (model_id,))
        assert one[1] == together[1][number :: len(SPECS)]
        assert_same(one[2][model_id], together[2][model_id])


@pytest.mark.slow
def test_recomputed_layers_change_no_bit(tmp_path: Path, divided: Make) -> None:
    runs = [_learn(divided(2, gradient_checkpointing=each), tmp_path / str(each), ("all",)) for each in (False, True)]
    assert_same_runs(runs[1], runs[0])


def test_files_are_those_of_one_device_and_go_on_with_any_number_of_ranks(
    tmp_path: Path, divided: Make, gathering: Make
) -> None:
    one, three = make_backend("mixture", micro_batch_tokens=48), divided(3)
    files: list[dict[str, bytes]] = []
    for number, backend in enumerate((one, three)):
        backend.create_model("all", SPECS["all"])
        directory = tmp_path / str(number)
        for name in ("state", "bf16"):
            (directory / name).mkdir(parents=True)
        backend.save_state("all", directory / "state")
        backend.save_adapter("all", directory / "bf16", dtype="bfloat16")
        files.append({str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*.*")})
    assert files[0] == files[1]
    ok(three.run(_passes("all", 0)))
    three.optim_step("all", STEP)
    ok(three.run(_passes("all", 1)))
    (tmp_path / "snapshot").mkdir()
    three.save_snapshot("all", tmp_path / "snapshot")
    before = saved(three, "all", tmp_path / "before")
    one.delete_model("all")
    after = []
    for number, backend in enumerate((three, divided(2), gathering(2, "mixture"), one)):
        if backend is not three:
            backend.restore_model("all", SPECS["all"], tmp_path / "snapshot")
            assert_same(saved(backend, "all", tmp_path / f"restored{number}"), before)
        backend.optim_step("all", STEP)
        after.append(saved(backend, "all", tmp_path / f"after{number}"))
    for state in after[1:]:
        assert_close(state, after[0], OF_WEIGHTS)


def test_each_rank_holds_its_experts_and_what_adapters_have_of_them(divided: Make) -> None:
    backend = divided(3)
    backend.create_model("experts", SPECS["experts"])
    facts = backend.group.call("memory")
    assert sum(each["parameters"] for each in facts) == facts[0]["all_parameters"]
    of_expert = 3 * 48 * 24
    held = [(each["parameters"] - facts[0]["parameters"]) / of_expert for each in facts]
    np.testing.assert_allclose(held, [0, LAYERS, LAYERS], atol=0.2)  # 2, 3 and 3 of the 8 experts
    numbers = [len(arrays[0]) for arrays, _ in backend.group.call("export", "experts", False)]
    assert [8 * number / sum(numbers) for number in numbers] == [2, 3, 3]


class FailsInTheMiddle(ExpertRank):
    """Rank 1 finds no memory where the other rank waits for its rows."""

    def _backward(self, *arguments: Any, **named: Any) -> Any:
        if self._rank == 1:
            raise torch.OutOfMemoryError("no memory left")
        return super()._backward(*arguments, **named)


def test_a_failure_where_rows_travel_ends_the_ranks(divided: Make) -> None:
    backend = divided(2, rank_class=FailsInTheMiddle, timeout_s=5.0)
    backend.create_model("all", SPECS["all"])
    with pytest.raises(RankDied):
        backend.run([train("all", sft(1, 20, 9))])


@pytest.mark.parametrize("merge", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "merged"])
def test_a_loss_that_is_not_finite_on_one_rank_fails_its_pass_alone(tmp_path: Path, divided: Make, merge: bool) -> None:
    bad = rl(1, 20, 20, 20)
    bad[1].loss_inputs["logprobs"] = np.full(20, -1e6, np.float32)
    good = train("all", sft(2, 9, 30, 4))
    states = []
    backends: list[Any] = [make_backend("mixture", micro_batch_tokens=48), divided(2, merge=merge)]
    for number, backend in enumerate(backends):
        backend.create_model("all", SPECS["all"])
        outcomes = backend.run([good, train("all", bad, "importance_sampling"), good])
        assert [type(each) for each in outcomes] == [PassResult, InvalidRequest, PassResult]
        states.append(saved(backend, "all", tmp_path / str(number)))
    assert_close(states[1], states[0], TOLERANCE)
    ranks = backends[1]
    ranks.clear_gradient("all")
    ok(ranks.run([train("all", overflowing(), "importance_sampling")]))
    with pytest.raises(FloatingPointError, match="norm inf"):
        ranks.optim_step("all", STEP)
    assert ranks.optim_step("all", STEP) == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_every_family_of_mixtures_can_be_divided(tmp_path: Path, divided: Make, family: str) -> None:
    """Also a number of experts that the ranks do not divide."""
    path = make_family(family, tmp_path)
    states = []
    for ranks in (1, 3):
        backend = divided(ranks, path=path)
        backend.create_model("all", SPECS["all"])
        ok(backend.run([train("all", sft(2, 9, 30, 4))]))
        backend.optim_step("all", STEP)
        ok(backend.run([train("all", sft(3, 9, 30, 4))]))
        states.append(saved(backend, "all", tmp_path / str(ranks)))
    assert_close(states[1], states[0], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_every_family_divides_a_sequence_as_ranks_that_gather_experts_do(
    tmp_path: Path, divided: Make, gathering: Make, family: str
) -> None:
    path = make_family(family, tmp_path)
    states = []
    for number, make in enumerate((divided, gathering)):
        backend = make(3, path=path, context_parallel_tokens=48)
        backend.create_model("all", SPECS["all"])
        ok(backend.run([train("all", sft(2, 9, 70, 4))]))
        backend.optim_step("all", STEP)
        ok(backend.run([train("all", sft(3, 60))]))
        states.append(saved(backend, "all", tmp_path / str(number)))
    assert_close(states[0], states[1], 1e-4)


@pytest.mark.slow
def test_ranks_read_their_experts_of_a_quantized_release(tmp_path: Path, divided: Make, gathering: Make) -> None:
    path = quantize(make_family("gpt-oss", tmp_path), tmp_path / "release", MXFP4, mxfp4)
    states = []
    for number, make in enumerate((divided, gathering)):
        backend = make(2, path=path)
        backend.create_model("all", SPECS["all"])
        ok(backend.run([train("all", sft(2, 9, 30, 4))]))
        states.append(saved(backend, "all", tmp_path / str(number)))
    assert_close(states[0], states[1], TOLERANCE)


def test_a_dense_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=rf"expert_parallel: {base_path()} is no mixture of experts"):
        make_divided(2, "qwen3")


def test_experts_are_divided_only_over_ranks_that_train_adapters() -> None:
    key = {"trainer.placement.expert_parallel": True}
    for placed in ({}, {"trainer.placement.policy_num_cpu_ranks": 1}):
        with pytest.raises(ConfigError, match=r"expert_parallel: experts are divided .* policy_num_cpu_ranks to 2 or"):
            load_config({"backend_config": key | placed})
    both = {**key, "trainer.placement.policy_num_cpu_ranks": 2, "trainer.full_finetuning": True}
    with pytest.raises(ConfigError, match=r"expert_parallel: with trainer\.full_finetuning"):
        load_config({"backend_config": both})
