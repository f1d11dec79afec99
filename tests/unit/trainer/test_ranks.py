"""Several ranks against training without ranks: losses, logprobs, gradients and weights; the same bits again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch_lora_support import (
    VOCAB,
    assert_close,
    assert_same,
    make_backend,
    make_ranks,
    ok,
    overflowing,
    rl,
    saved,
    sft,
    spec,
    train,
)

from skyrl.trainer.lora.adapter import Target
from skyrl.trainer.model import logprobs as logprobs_module
from skyrl.trainer.model import recomputation
from skyrl.trainer.model.row_budget import RowBudget, measure_row
from skyrl.trainer.protocol import Backend, InvalidRequest, PassResult, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.ranks.lora_rank import LoraRank

SPECS = {
    "all": spec(8, 1),
    "attention": spec(4, 2, train_mlp=False, train_unembed=False),
    "unembed": spec(2, 3, train_attn=False, train_mlp=False),
}
STEPS = 2
PASSES = 5
"""The number of passes that each model has in a step."""


def _passes(model_id: str, step: int) -> list[TrainingPass]:
    return uneven_passes(model_id, 100 * step + list(SPECS).index(model_id))


def _learn(backend: Any, directory: Path, model_ids: tuple[str, ...] = tuple(SPECS)) -> Run:
    return learn_together(backend, directory, {each: SPECS[each] for each in model_ids}, _passes, STEPS)


@pytest.fixture
def ranks() -> Iterator[Callable[..., LoraBackend]]:
    """`make_ranks`; closes the backends at the end."""
    with closed_at_end(make_ranks) as make:
        yield make


Ranks = Callable[..., LoraBackend]


@pytest.mark.parametrize(
    ("architecture", "count", "settings"),
    [
        pytest.param("qwen3", 2, {}, marks=pytest.mark.slow),
        pytest.param("qwen3", 3, {}, marks=pytest.mark.slow),
        ("qwen3", 3, {"merge": True}),
        pytest.param("qwen3", 2, {"gradient_checkpointing": True}, marks=pytest.mark.slow),
        ("qwen3-tied", 2, {}),
        pytest.param("qwen3-tied", 3, {"gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param("qwen2-window", 2, {}, marks=pytest.mark.slow),
        ("llama", 3, {}),
    ],
)
def test_ranks_train_as_one_device_does(
    tmp_path: Path, ranks: Ranks, architecture: str, count: int, settings: dict[str, bool]
) -> None:
    expected = _learn(make_backend(architecture, micro_batch_tokens=48), tmp_path / "one")
    assert_close_runs(_learn(ranks(count, architecture, **settings), tmp_path / "ranks"), expected)


class ShortOfMemory(LoraRank):
    """Rank 0 has no memory for activations, and the other has plenty."""

    def load(self) -> Any:
        recomputation.FREE_ANYHOW = 0
        recomputation.free_host_bytes = lambda: 0.0 if self._rank == 0 else 1e15
        facts = super().load()
        chosen: Any = self.base.packed.recomputation
        self._choices: list[bool] = []
        pays = chosen.pays
        chosen.pays = lambda rows: (self._choices.append(answer := pays(rows)), answer)[1]
        return facts

    def choices(self) -> list[bool]:
        return self._choices


def test_all_ranks_recompute_layers_when_one_has_too_little_memory(tmp_path: Path, ranks: Ranks) -> None:
    expected = _learn(make_backend(micro_batch_tokens=48), tmp_path / "one", ("all",))
    backend = ranks(2, rank_class=ShortOfMemory)
    assert_close_runs(_learn(backend, tmp_path / "ranks", ("all",)), expected)
    one, other = backend.group.call("choices")
    assert one == other
    assert set(one) == {True}


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-tied"])
def test_one_rank_gives_the_bits_of_one_device(tmp_path: Path, ranks: Ranks, architecture: str) -> None:
    expected = _learn(make_backend(architecture, micro_batch_tokens=48), tmp_path / "one")
    assert_same_runs(_learn(ranks(1, architecture), tmp_path / "rank"), expected)


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_same_number_of_ranks_gives_the_same_bits_again_also_beside_other_models(
    tmp_path: Path, ranks: Ranks, count: int
) -> None:
    together, again = (_learn(ranks(count), tmp_path / name) for name in ("together", "again"))
    assert_same_runs(again, together)
    alone = ranks(count)
    assert alone.repeats_exactly
    for number, model_id in enumerate(SPECS):
        one = _learn(alone, tmp_path / "alone", (model_id,))
        assert_same_runs(
            one, (_of(together[0], number), together[1][number :: len(SPECS)], {model_id: together[2][model_id]})
        )


def _of(results: list[PassResult], number: int) -> list[PassResult]:
    """The results of one model out of those of `_learn` with all models."""
    mixed = PASSES * STEPS * len(SPECS)
    last = mixed + PASSES * number
    return results[:mixed][number :: len(SPECS)] + results[last : last + PASSES]


def test_grouping_of_passes_does_not_change_the_gradients(tmp_path: Path, ranks: Ranks) -> None:
    queue = [each for model_id in SPECS for each in _passes(model_id, 0)]
    states = []
    backend = ranks(2)
    for name, groups in (("all", [queue]), ("singly", [[each] for each in queue])):
        for model_id, each in SPECS.items():
            backend.create_model(model_id, each)
        for group in groups:
            ok(backend.run(group))
        states.append({m: saved(backend, m, tmp_path / name / m) for m in SPECS})
        for model_id in SPECS:
            backend.delete_model(model_id)
    for model_id in SPECS:
        assert_same(states[0][model_id], states[1][model_id])


@pytest.mark.parametrize("merge", [False, True], ids=["alone", "merged"])
def test_a_loss_that_is_not_finite_on_one_rank_fails_its_pass_alone(tmp_path: Path, ranks: Ranks, merge: bool) -> None:
    """One of the pass's sequences, and so one rank, has the infinite ratio."""
    bad = rl(1, 20, 20, 20)
    bad[1].loss_inputs["logprobs"] = np.full(20, -1e6, np.float32)
    good = train("all", sft(2, 9, 30, 4))
    one, several = make_backend(micro_batch_tokens=48), ranks(2, merge=merge)
    states, outcomes = [], []
    backends: list[Backend] = [one, several]
    for number, backend in enumerate(backends):
        for model_id in ("all", "attention"):
            backend.create_model(model_id, SPECS[model_id])
        outcomes.append(
            backend.run([good, train("all", bad, "importance_sampling"), train("attention", list(good.data)), good])
        )
        states.append([saved(backend, m, tmp_path / f"{number}{m}") for m in ("all", "attention")])  # type: ignore[arg-type]
    for of_one, of_several in zip(*outcomes, strict=True):
        assert type(of_one) is type(of_several)
    assert str(outcomes[1][1]) == str(outcomes[0][1])
    assert "the sum of importance_sampling is " in str(outcomes[1][1])
    for expected, state in zip(*states, strict=True):
        assert_close(state, expected, TOLERANCE)


def test_a_gradient_that_is_not_finite_makes_no_step(tmp_path: Path, ranks: Ranks) -> None:
    backend = ranks(2)
    backend.create_model("all", SPECS["all"])
    before = saved(backend, "all", tmp_path / "before")
    data = overflowing()
    ok(backend.run([train("all", data, "importance_sampling")]))
    with pytest.raises(FloatingPointError, match="norm inf"):
        backend.optim_step("all", STEP)
    assert_same(saved(backend, "all", tmp_path / "after"), before)
    assert backend.optim_step("all", STEP) == {}


def test_a_snapshot_of_two_ranks_goes_on_with_any_number_and_without_ranks(tmp_path: Path, ranks: Ranks) -> None:
    """And back: the files are the same."""
    two = ranks(2)
    _learn(two, tmp_path / "two", ("all",))
    (tmp_path / "snapshot").mkdir()
    two.save_snapshot("all", tmp_path / "snapshot")
    before = saved(two, "all", tmp_path / "before")
    backends: list[Any] = [ranks(1), ranks(3), make_backend(micro_batch_tokens=48), ranks(2)]
    after = []
    for number, backend in enumerate((*backends, two)):
        if backend is not two:
            backend.restore_model("all", SPECS["all"], tmp_path / "snapshot")
            assert_same(saved(backend, "all", tmp_path / f"restored{number}"), before)
        ok(backend.run(_passes("all", 9)))
        metrics = backend.optim_step("all", STEP)
        assert metrics["optimizer_step"] == STEPS + 1
        after.append(saved(backend, "all", tmp_path / f"after{number}"))
    assert_same(after[3], after[4])
    for state in after:
        assert_close(state, after[4], TOLERANCE)


def test_loads_saves_and_exports_are_those_of_one_device(tmp_path: Path, ranks: Ranks) -> None:
    one, two = make_backend(), ranks(2)
    files: list[dict[str, bytes]] = []
    for number, backend in enumerate((one, two)):
        backend.create_model("m", spec(4, 9))
        with pytest.raises(InvalidRequest, match="exists already"):
            backend.create_model("m", spec(4, 9))
        directory = tmp_path / str(number)
        for name in ("state", "f32", "bf16"):
            (directory / name).mkdir(parents=True)
        backend.save_state("m", directory / "state")
        backend.save_adapter("m", directory / "f32")
        backend.save_adapter("m", directory / "bf16", dtype="bfloat16")
        files.append({str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*.*")})
    assert files[0] == files[1]
    ok(two.run([train("m", sft(0, 9, 4))]))
    two.optim_step("m", STEP)
    ok(two.run([train("m", sft(1, 9, 4))]))
    trained = saved(two, "m", tmp_path / "trained")
    two.load_state("m", tmp_path / "trained", optimizer=False)
    assert {key.partition(".")[0] for key in saved(two, "m", tmp_path / "weights-only")} == {"weights"}
    two.load_state("m", tmp_path / "trained", optimizer=True)
    assert_same(saved(two, "m", tmp_path / "loaded"), trained)
    two.clear_gradient("m")
    assert not any(key.startswith("gradient") for key in saved(two, "m", tmp_path / "cleared"))
    two.create_model("other", spec(8, 9))
    with pytest.raises(InvalidRequest, match="rank"):
        two.load_state("other", tmp_path / "trained", optimizer=True)
    with pytest.raises(FileNotFoundError):
        two.restore_model("third", spec(4, 9), tmp_path)
    two.delete_model("m")
    two.delete_model("m")
    for unknown in ("m", "third"):
        with pytest.raises(InvalidRequest, match="there is no model"):
            two.optim_step(unknown, STEP)


def test_ranks_have_the_probes_of_one_device(ranks: Ranks) -> None:
    results = []
    for backend in (make_backend(), ranks(2)):
        backend.create_probe("p", spec(2), ["mlp.down_proj"], 0.05)
        (result,) = ok(backend.run([TrainingPass("p", sft(5, 24), "cross_entropy", backward=False)]))
        backend.delete_model("p")
        results.append((backend.kinds_of_layers(spec()), result.logprobs[0]))
    assert results[0][0] == results[1][0]
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-5, atol=1e-5)


def test_bad_passes_are_refused_before_they_reach_a_rank(ranks: Ranks) -> None:
    backend = ranks(2)
    backend.create_model("all", SPECS["all"])
    (bad,) = sft(0, 4)
    bad.tokens[2] = 10**6
    good = train("all", sft(1, 5))
    results = backend.run([train("all", [bad]), train("unknown", sft(0, 4)), good])
    assert [type(each) for each in results] == [InvalidRequest, InvalidRequest, PassResult]
    assert "model_input" in str(results[0])
    with pytest.raises(InvalidRequest, match="rank"):
        backend.create_model("big", spec(10**4))


class CountingRank(LoraRank):
    """Counts what FSDP2 gathers, with logits in chunks of 16 rows."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gathered = 0
        module: Any = _fsdp_param_group
        gather = module.foreach_all_gather

        def counted(*arguments: Any) -> Any:
            self.gathered += 1
            return gather(*arguments)

        module.foreach_all_gather = counted
        logprobs_module.LOGITS_BYTES = 16 * VOCAB * 4

    def count(self) -> int:
        gathered, self.gathered = self.gathered, 0
        return gathered


def test_each_micro_batch_gathers_the_same_parameters_once(ranks: Ranks) -> None:
    """The two layers in forward and in backward, and the rest: whatever the segments, chunks and targets. A rank with
    nothing to do gathers as much."""
    backend = ranks(2, rank_class=CountingRank, merge=True, micro_batch_tokens=256)
    for model_id, each in SPECS.items():
        backend.create_model(model_id, each)
    backend.group.call("count")
    passes = [train(model_id, sft(1, 30, 30, 3)) for model_id in SPECS]
    for queue, expected in (
        (passes[:1], 5),
        (passes, 5),
        ([train("unembed", sft(1, 9))], 5),
        ([TrainingPass("all", sft(1, 30, 9), "cross_entropy", backward=False)], 3),
    ):
        ok(backend.run(queue))
        assert backend.group.call("count") == [expected, expected]


class UnequalRank(LoraRank):
    """Rank 1 has memory for fewer rows. Each measures a row, as on CUDA."""

    def _row_budget(self, targets: Sequence[Target]) -> RowBudget:
        measure_row(self.base, targets)
        self.base.packed.reshard()
        return RowBudget(4096 >> self._rank, "a test")


def test_ranks_measure_a_row_together_and_take_the_smallest_budget(ranks: Ranks) -> None:
    backend = ranks(2, rank_class=UnequalRank, micro_batch_tokens=None)
    assert backend.micro_batch_tokens == 2048
    backend.create_model("m", spec())
    ok(backend.run([train("m", sft(0, 40, 40))]))


def test_each_rank_holds_its_part_of_the_parameters(ranks: Ranks) -> None:
    for count in (1, 2, 3):
        with closing(make_ranks(count, "qwen3-tied")) as backend:
            facts = backend.group.call("memory")
            held = [each["parameters"] for each in facts]
            assert sum(held) == facts[0]["all_parameters"]
            assert max(held) <= 1.05 * facts[0]["all_parameters"] / count
