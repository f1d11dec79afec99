"""What every kind of training promises, on one device and over ranks: adapters, whole models, experts that are divided
over ranks, and base models that stay quantized."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors import SafetensorError
from torch import Tensor
from torch_lora_support import assert_close, assert_same, files_saved, ok, overflowing, rl, sft, spec, train
from trainer_kinds import (
    BY_NAME,
    EXPERTS,
    FULL,
    KEPT,
    KINDS,
    LORA,
    STEP,
    TOLERANCE,
    WHOLE,
    Kind,
    Run,
    assert_close_runs,
    assert_same_results,
    assert_same_runs,
    learn,
    passes_of,
    slow,
)

from skyrl.trainer.passes import pass_run
from skyrl.trainer.protocol import Datum, InvalidRequest, OutOfMemory, PassResult, PlaceTaken, TrainingPass
from skyrl.trainer.ranks import plan
from skyrl.trainer.rows.prefixes import PrefixTree, prefix_tree

OTHER = spec(4, 2, train_mlp=False)


class Learned(NamedTuple):
    """What a backend gave. `probe`: logprobs of the base model. `saved`: the directory of the run's state. `files`: all
    that can be saved then, by name. `later`: the state after a further step and passes."""

    probe: np.ndarray
    run: Run
    saved: Path
    files: dict[str, bytes]
    later: dict[str, Tensor]


class Case(NamedTuple):
    kind: Kind
    ranks: int
    backend: Any
    learned: Learned

    def create(self, model_id: str = "m") -> None:
        self.backend.create_model(model_id, self.kind.model)

    def state(self, directory: Path) -> dict[str, Tensor]:
        return files_saved(self.backend, "m", directory)


def _files(backend: Any, directory: Path) -> dict[str, bytes]:
    """Every file of the model's state and of its exports."""
    for name in ("state", "own", "rounded"):
        (directory / name).mkdir(parents=True)
    backend.save_state("m", directory / "state")
    backend.save_adapter("m", directory / "own")
    backend.save_adapter("m", directory / "rounded", dtype="bfloat16")
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*.*")}


def _forward(backend: Any) -> np.ndarray:
    (result,) = ok(backend.run([TrainingPass("m", sft(5, 24), "cross_entropy", backward=False)]))
    return result.logprobs[0]


def _go_on(kind: Kind, backend: Any, directory: Path) -> dict[str, Tensor]:
    assert backend.optim_step("m", STEP)["optimizer_step"] == 3
    ok(backend.run(passes_of(kind, "m", 3)))
    return files_saved(backend, "m", directory)


def _learned(kind: Kind, backend: Any, directory: Path) -> Learned:
    backend.create_probe("m", kind.model)
    probe = _forward(backend)
    backend.delete_model("m")
    run = learn(kind, backend, directory / "state")
    files = _files(backend, directory / "files")
    later = _go_on(kind, backend, directory / "later")
    backend.delete_model("m")
    return Learned(probe, run, directory / "state", files, later)


@pytest.fixture(scope="module")
def learned_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Learned]:
    """What a kind gives with some number of ranks."""
    found: dict[tuple[str, int], Learned] = {}

    def with_ranks(kind: Kind, ranks: int, backend: Any = None) -> Learned:
        if (kind.name, ranks) not in found:
            made = backend or kind.backend(ranks)
            found[kind.name, ranks] = _learned(kind, made, tmp_path_factory.mktemp(f"{kind.name}{ranks}"))
            if backend is None:
                made.close()
        return found[kind.name, ranks]

    return with_ranks


LearnedWith = Callable[..., Learned]
CASES = [(kind.name, ranks) for kind in KINDS for ranks in (1, 2)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def shared(request: pytest.FixtureRequest, learned_with: LearnedWith) -> Iterator[Case]:
    name, ranks = request.param
    backend = BY_NAME[name].backend(ranks, faulty=True)
    yield Case(BY_NAME[name], ranks, backend, learned_with(BY_NAME[name], ranks, backend))
    backend.close()


@pytest.fixture
def case(shared: Case) -> Iterator[Case]:
    """A backend without models, which other tests use, too."""
    yield shared
    shared.backend.group.call("lack_memory", None)
    for model_id in ("m", "n", "other"):
        shared.backend.delete_model(model_id)


over_ranks = pytest.mark.parametrize(
    "shared", [each for each in CASES if each[1] > 1], indirect=True, ids=lambda case: f"{case[0]}-{case[1]}"
)


@over_ranks
def test_ranks_train_as_one_device_does_and_write_the_same_files(
    case: Case, learned_with: LearnedWith, tmp_path: Path
) -> None:
    one = learned_with(case.kind, 1)
    assert_close_runs(case.learned.run, one.run, case.kind.tolerance)
    np.testing.assert_allclose(case.learned.probe, one.probe, rtol=TOLERANCE, atol=TOLERANCE)
    case.backend.restore_model("m", case.kind.model, one.saved)
    assert _files(case.backend, tmp_path / "files") == one.files
    assert_close(_go_on(case.kind, case.backend, tmp_path / "later"), one.later, case.kind.tolerance)


@pytest.mark.parametrize(
    ("kind", "architecture", "ranks", "settings"),
    [
        (LORA, "llama", 3, {"merge_passes": True}),
        (FULL, "empty-shards", 3, {}),
        slow(LORA, "qwen3", 3, {"gradient_checkpointing": True}),
        slow(LORA, "qwen2-window", 2, {}),
        slow(FULL, "qwen3", 3, {"gradient_checkpointing": True}),
        slow(FULL, "qwen2-window", 3, {}),
        slow(EXPERTS, "mixture", 3, {}),
        slow(EXPERTS, "mixture", 3, {"merge_passes": True}),
        slow(EXPERTS, "mixture-of-wide-experts", 3, {"gradient_checkpointing": True}),
        slow(KEPT, None, 3, {"merge_passes": True}),
    ],
    ids=str,
)
def test_other_models_settings_and_numbers_of_ranks_give_the_numbers_of_one_device(
    tmp_path: Path, kind: Kind, architecture: str | None, ranks: int, settings: dict[str, Any]
) -> None:
    """The 97 rows of the embeddings are divisible by no number of ranks."""
    runs = []
    for number, options in ((1, {}), (ranks, settings)):
        backend = kind.backend(number, architecture=architecture, **options)
        runs.append(learn(kind, backend, tmp_path / str(number), steps=1))
        backend.close()
    assert_close_runs(runs[1], runs[0], 5 * kind.tolerance)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [(LORA, 2), (FULL, 1), (EXPERTS, 1), (KEPT, 2), slow(LORA, 1), slow(FULL, 2), slow(EXPERTS, 2), slow(KEPT, 1)],
    ids=str,
)
def test_recomputed_layers_change_no_bit(tmp_path: Path, kind: Kind, ranks: int, learned_with: LearnedWith) -> None:
    backend = kind.backend(ranks, gradient_checkpointing=True, faulty=True)
    assert_same_runs(learn(kind, backend, tmp_path / "state"), learned_with(kind, ranks).run)
    assert all(backend.group.call("recomputed"))
    backend.close()


def test_the_same_commands_give_the_same_bits_also_beside_other_models_and_one_by_one(
    case: Case, tmp_path: Path
) -> None:
    assert case.backend.repeats_exactly
    if not case.kind.is_full:
        case.backend.create_model("other", OTHER)

    def run(backend: Any, passes: list[TrainingPass]) -> list[PassResult]:
        beside = [[] if case.kind.is_full else [replace(each, model_id="other")] for each in passes]
        return [ok(backend.run([*others, each]))[-1] for others, each in zip(beside, passes, strict=True)]

    assert_same_runs(learn(case.kind, case.backend, tmp_path / "again", run=run), case.learned.run)


def test_a_forward_leaves_no_gradient_and_has_the_numbers_of_a_training_pass(case: Case) -> None:
    case.create()
    data = rl(0, 12, 30)
    forward = ok(case.backend.run([TrainingPass("m", data, "ppo", backward=False)]))
    assert case.backend.optim_step("m", STEP) == {}
    assert_same_results(ok(case.backend.run([train("m", data, "ppo")])), forward)


def test_gradients_add_up_until_a_step_or_a_command_clears_them(case: Case, tmp_path: Path) -> None:
    case.create()
    start, data = case.state(tmp_path / "start"), sft(0, 12, 30, 7)
    ok(case.backend.run([train("m", data)]))
    whole = case.state(tmp_path / "whole")
    assert {name.split(".")[0] for name in whole.keys() - start.keys()} == {"gradient"}
    case.backend.clear_gradient("m")
    assert_same(case.state(tmp_path / "cleared"), start)
    ok(case.backend.run([train("m", [datum]) for datum in data]))
    assert_close(case.state(tmp_path / "parts"), whole, TOLERANCE)
    assert case.backend.optim_step("m", STEP)["optimizer_step"] == 1
    stepped = case.state(tmp_path / "stepped")
    assert {name.split(".")[0] for name in stepped.keys() - start.keys()} == {"exp_avg", "exp_avg_sq"}
    assert case.backend.optim_step("m", STEP) == {}
    assert_same(case.state(tmp_path / "again"), stepped)


def test_a_saved_state_goes_on_to_the_last_bit(case: Case, tmp_path: Path) -> None:
    """Restored, or loaded over what the model has done since."""
    case.backend.restore_model("m", case.kind.model, case.learned.saved)
    assert_same(case.state(tmp_path / "restored"), case.learned.run.state)
    assert_same(_go_on(case.kind, case.backend, tmp_path / "later"), case.learned.later)
    case.backend.load_state("m", case.learned.saved, optimizer=True)
    assert_same(_go_on(case.kind, case.backend, tmp_path / "again"), case.learned.later)


def test_loading_without_the_optimizer_leaves_nothing_of_earlier_steps(case: Case, tmp_path: Path) -> None:
    """A model with moments and a gradient goes on as a fresh one does that has loaded the same."""
    ends = []
    for name in ("fresh", "trained"):
        case.create()
        if name == "trained":
            ok(case.backend.run([train("m", sft(7, 20))]))
            case.backend.optim_step("m", STEP)
            ok(case.backend.run([train("m", sft(8, 20))]))
        case.backend.load_state("m", case.learned.saved, optimizer=False)
        parts = ("exp_avg", "exp_avg_sq", "gradient")
        expected = {key: one for key, one in case.learned.run.state.items() if key.split(".")[0] not in parts}
        assert_same(case.state(tmp_path / name), expected)
        assert case.backend.optim_step("m", STEP) == {}
        ok(case.backend.run([train("m", sft(9, 20))]))
        assert case.backend.optim_step("m", STEP)["optimizer_step"] == 1
        ends.append(case.state(tmp_path / f"{name}-end"))
        case.backend.delete_model("m")
    assert_same(*ends)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _other_format(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))


def test_a_load_that_fails_changes_nothing(case: Case, learned_with: LearnedWith, tmp_path: Path) -> None:
    case.create()
    ok(case.backend.run([train("m", sft(1, 20))]))
    before = case.state(tmp_path / "before")
    failures = (OSError, ValueError, SafetensorError)
    weights = "model.safetensors" if case.kind.is_full else "adapter_model.safetensors"
    optimizer = next(file.name for file in case.learned.saved.glob("optimizer*.safetensors"))

    def refused(number: int, directory: Path, expected: Any = failures, said: str | None = None) -> None:
        with pytest.raises(expected, match=said):
            case.backend.load_state("m", directory, optimizer=True)
        assert_same(case.state(tmp_path / f"after{number}"), before)

    damages: list[tuple[str, Callable[[Path], object]]] = [
        *((name, damage) for name in (weights, optimizer, "state.json") for damage in (_cut, Path.unlink)),
        ("state.json", _other_format),
        (optimizer, lambda file: shutil.copy(file.with_name(weights), file)),
    ]
    for number, (name, damage) in enumerate(damages):
        directory = Path(shutil.copytree(case.learned.saved, tmp_path / f"damaged{number}"))
        damage(directory / name)
        refused(number, directory)
    refused(97, tmp_path / "nowhere")
    other, said = (LORA, "holds a LoRA adapter") if case.kind.is_full else (FULL, "holds a whole model")
    refused(98, learned_with(other, 1).saved, InvalidRequest, said)
    refused(99, learned_with(KEPT if case.kind is LORA else LORA, 1).saved, (InvalidRequest, *failures))
    case.backend.delete_model("m")
    with pytest.raises(failures):
        case.backend.restore_model("m", case.kind.model, tmp_path / "damaged0")
    case.create()


def test_models_that_exist_and_those_that_do_not_are_refused(case: Case, tmp_path: Path) -> None:
    case.create()
    before = case.state(tmp_path / "before")
    for make in (case.backend.create_model, case.backend.create_probe):
        with pytest.raises(InvalidRequest, match="model_id: m exists already"):
            make("m", case.kind.model)
    wrong = spec(8) if case.kind.is_full else WHOLE
    for bad in (wrong, replace(case.kind.model, train_attn=False, train_mlp=False, train_unembed=False)):
        with pytest.raises(InvalidRequest, match="lora_config"):
            case.backend.create_model("n", bad)
    if case.kind.is_full:
        with pytest.raises(PlaceTaken, match="another model is being trained"):
            case.create("n")
    ok(case.backend.run([train("m", sft(1, 9))]))
    case.backend.optim_step("m", STEP)
    ok(case.backend.run([train("m", sft(1, 9))]))
    for model_id in ("unknown", "m", "m"):
        case.backend.delete_model(model_id)
    actions: list[Callable[[], object]] = [
        lambda: case.backend.save_state("m", tmp_path),
        lambda: case.backend.load_state("m", case.learned.saved, optimizer=True),
        lambda: case.backend.save_adapter("m", tmp_path),
        lambda: case.backend.clear_gradient("m"),
        lambda: case.backend.optim_step("m", STEP),
        lambda: ok(case.backend.run([train("m", sft(0, 9))])),
    ]
    for action in actions:
        with pytest.raises(InvalidRequest, match="model_id: there is no model m"):
            action()
    case.create()
    assert_same(case.state(tmp_path / "after"), before)
    assert np.array_equal(_forward(case.backend), case.learned.probe), "training changes no base model"


def _outcomes(case: Case, tmp_path: Path, bad: Sequence[TrainingPass]) -> list[Any]:
    """Of bad passes between two good ones, which have their own gradients to the last bit, and so have later passes."""
    good, states = train("m", rl(2, 30, 30, 9), "ppo"), []
    outcomes: list[Any] = []
    for number, between in enumerate(([], bad)):
        case.create()
        first, *outcomes, last = case.backend.run([good, *between, good])
        ok([first, last])
        ok(case.backend.run([good] * 3))
        states.append(case.state(tmp_path / str(number)))
        case.backend.delete_model("m")
    assert_same(*states)
    return outcomes


def test_a_pass_that_cannot_be_run_fails_alone(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its data, its loss, a number that is not finite on one rank, an error on one rank, or memory."""
    infinite, strange, large = rl(1, 20, 20, 20), sft(0, 4), sft(3, 8, 30)
    infinite[1].loss_inputs["logprobs"] = np.full(20, -1e6, np.float32)
    strange[0].tokens[2] = 10**6

    def short(data: Sequence[Datum]) -> PrefixTree:
        if data is large:
            raise MemoryError("no memory left")
        return prefix_tree(data)

    for module in (plan, pass_run):
        monkeypatch.setattr(module, "prefix_tree", short)
    bad: list[tuple[TrainingPass, type[Exception], str]] = [
        (
            train("m", infinite, "importance_sampling"),
            InvalidRequest,
            "the sum of importance_sampling is .*inf, no",
        ),
        (train("m", strange), InvalidRequest, "model_input"),
        (train("unknown", sft(0, 4)), InvalidRequest, "there is no model unknown"),
        (train("m", rl(2, 30, 30, 30), "dro"), RuntimeError, "this loss fails on the last rank"),
        (train("m", large), OutOfMemory, "no memory left"),
    ]
    outcomes = _outcomes(case, tmp_path, [each for each, _, _ in bad])
    for outcome, (_, expected, said) in zip(outcomes, bad, strict=True):
        with pytest.raises(expected, match=said):
            raise outcome


def test_a_gradient_that_is_not_finite_makes_no_step(case: Case, tmp_path: Path) -> None:
    case.create()
    before = case.state(tmp_path / "before")
    ok(case.backend.run([train("m", overflowing(), "importance_sampling")]))
    with pytest.raises(FloatingPointError, match="norm inf; the weights were not changed and the gradient was cleared"):
        case.backend.optim_step("m", STEP)
    assert_same(case.state(tmp_path / "after"), before)
    assert case.backend.optim_step("m", STEP) == {}


def test_memory_that_runs_out_where_ranks_agree_changes_nothing_on_any(case: Case, tmp_path: Path) -> None:
    """At every such place of every command. A whole model agrees in more places."""
    states = itertools.count()
    before: dict[str, Tensor] | None = None

    def run_short(command: Callable[[], object]) -> int:
        """Returns how often the command found no memory."""
        for after in itertools.count():
            case.backend.group.call("lack_memory", after)
            try:
                command()
            except OutOfMemory:
                if before is not None:
                    assert_same(case.state(tmp_path / f"short{next(states)}"), before)
                continue
            assert case.backend.group.call("lack_memory", None)[-1], "the failure was noticed"
            return after
        raise AssertionError

    learning = [train("m", sft(1, 20, 9))]
    assert run_short(case.create) == 1
    before = case.state(tmp_path / "created")
    assert run_short(lambda: ok(case.backend.run(learning))) == case.kind.is_full
    before = case.state(tmp_path / "ran")
    assert run_short(lambda: case.backend.optim_step("m", STEP)) == 2, "the norm, and the step"
    before = case.state(tmp_path / "stepped")
    stepped = before
    for name, save in (("state", case.backend.save_state), ("model", case.backend.save_adapter)):
        (directory := tmp_path / name).mkdir()
        assert (run_short(lambda save=save, to=directory: save("m", to)) > 0) == case.kind.is_full
    ok(case.backend.run(learning))
    case.backend.optim_step("m", STEP)
    before = case.state(tmp_path / "later")
    assert run_short(lambda: case.backend.load_state("m", tmp_path / "state", optimizer=True)) >= 1
    assert_same(case.state(tmp_path / "loaded"), stepped)
    case.backend.delete_model("m")
    case.create()
    ok(case.backend.run(learning))
    case.backend.optim_step("m", STEP)
    assert_same(case.state(tmp_path / "undisturbed"), stepped)


def test_a_model_that_is_deleted_while_it_is_saved_fails_the_save_alone(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without others keeps a whole model until the save has ended."""
    case.backend.restore_model("m", case.kind.model, case.learned.saved)
    deleted: list[str] = []

    def deleting(ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(method: str, *arguments: Any) -> Any:
            if method in ("export", "read_part") and not deleted:
                deleted.append(method)
                case.backend.delete_model("m")
                case.create("n")
            return ask(method, *arguments)

        return asked

    for name in ("call", "read", "read_all"):
        monkeypatch.setattr(case.backend.group, name, deleting(getattr(case.backend.group, name)))
    if case.kind.is_full and case.ranks == 1:
        assert_same(case.state(tmp_path / "saved"), case.learned.run.state)
    else:
        with pytest.raises(InvalidRequest, match="there is no model m"):
            case.state(tmp_path / "saved")
    assert deleted
    case.backend.delete_model("n")
    case.create()
    np.testing.assert_allclose(_forward(case.backend), case.learned.probe, rtol=TOLERANCE, atol=TOLERANCE)


@over_ranks
def test_what_is_held_is_divided_by_the_number_of_ranks(case: Case) -> None:
    case.backend.restore_model("m", case.kind.model, case.learned.saved)
    facts = case.backend.group.call("memory")
    whole = facts[0]["all_parameters"]
    parts = {"parameters": whole}
    if case.kind.is_full:
        parts |= {"weights": 4 * whole, "gradient": 4 * whole, "moments": 8 * whole}
    for part, size in parts.items():
        assert sum(each[part] for each in facts) == size
        assert max(each[part] for each in facts) < 1.05 * size / case.ranks, part
    assert (sum(each["held"] for each in facts) < 0.5 * 4 * whole) == (case.kind is KEPT)
