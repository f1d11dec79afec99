"""What only mixtures of experts promise: which layers an adapter trains there, what its files say, experts that ranks
hold instead of gathering them, and rows that travel to them. test_mixture_families compares with transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch_lora_support import assert_close, assert_same, make_backend, ok, saved, sft, spec, train, with_experts
from trainer_kinds import EXPERTS, STEP, assert_same_results, closed_at_end, passes_of

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.base.model_files import FROZEN_EXPERTS
from skyrl.trainer.lora.adapter import Target
from skyrl.trainer.model.row_budget import BudgetSettings
from skyrl.trainer.protocol import AdamParams, InvalidRequest, Mixture, TrainingPass
from skyrl.trainer.ranks import rank as rank_module
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.ranks.lora_rank import ExpertRank, LoraRank
from tests.families import MIXTURES, make_family
from tests.local_ranks import rank_of
from tests.quantized import MXFP4, mxfp4, quantize

LENGTHS = (7, 31, 1, 18)
SETTING = "policy.model.lora.train_mlp_of_mixtures"
LEAVE_OUT: dict[str, Any] = {SETTING: "leave_out"}
REFUSE: dict[str, Any] = {SETTING: "refuse"}
EXPERT = "model.layers.1.mlp.experts"
Make = Callable[..., Any]


def _trained(**options: Any) -> LoraBackend:
    backend = make_backend("mixture", micro_batch_tokens=48, **options)
    backend.create_model("m", spec(8, 5))
    for step in range(2):
        ok(backend.run([train("m", sft(step, *LENGTHS))]))
        backend.optim_step("m", AdamParams(learning_rate=1e-2))
    return backend


def test_a_state_without_experts_does_not_load_into_an_adapter_with_them(tmp_path: Path) -> None:
    backend = _trained()
    backend.create_model("other", spec(8, 5, train_mlp=False))
    for one, other in (("m", "other"), ("other", "m")):
        saved(backend, one, tmp_path / one)
        with pytest.raises(InvalidRequest, match=r"train_mlp.* differ.*experts\.down_proj"):
            backend.load_state(other, tmp_path / one, optimizer=False)
    dense = make_backend()
    dense.create_model("m", spec(8, 5))
    with pytest.raises(InvalidRequest, match=r"layers of the base model that this server cannot train: model.layers.0"):
        dense.load_state("m", tmp_path / "m", optimizer=False)


@pytest.mark.parametrize(("saved_with", "later"), [({}, LEAVE_OUT), ({}, REFUSE), (LEAVE_OUT, {})], ids=str)
def test_a_model_goes_on_with_its_own_layers_where_the_setting_has_changed(
    tmp_path: Path, saved_with: dict[str, Any], later: dict[str, Any]
) -> None:
    """Restored from a snapshot, and as a checkpoint in a model of the same flags."""
    before = saved(_trained(**saved_with), "m", tmp_path / "before")
    states: list[dict[str, Tensor]] = []
    backend: Any = None
    for number, options in enumerate((saved_with, later)):
        backend = make_backend("mixture", micro_batch_tokens=48, **options)
        backend.restore_model("m", spec(8, 5), tmp_path / "before")
        (result,) = ok(backend.run([train("m", sft(5, *LENGTHS))]))
        assert (FROZEN_EXPERTS in result.metrics) == (saved_with is LEAVE_OUT)
        states.append(saved(backend, "m", tmp_path / str(number)))
    assert_same(*states)
    if not later:
        backend.create_model("new", spec(8, 0))
        backend.load_state("new", tmp_path / "before", optimizer=True)
        assert_same(saved(backend, "new", tmp_path / "after"), before)


@pytest.mark.parametrize("change", ["lacks", "is larger"])
def test_a_file_that_lacks_an_expert_or_has_one_of_another_shape_is_refused_by_name(
    tmp_path: Path, change: str
) -> None:
    backend = _trained()
    saved(backend, "m", tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    matrix = tensors.pop(f"base_model.model.{EXPERT}.5.up_proj.lora_A.weight")
    assert matrix.shape == (8, 48)
    if change == "is larger":
        tensors[f"base_model.model.{EXPERT}.5.up_proj.lora_A.weight"] = torch.cat([matrix, matrix])
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"names differ.*{EXPERT}"):
        backend.load_state("m", tmp_path, optimizer=False)


def test_replayed_experts_get_the_gradient_and_others_get_none(tmp_path: Path) -> None:
    backend = make_backend("mixture")
    backend.create_model("m", spec(8, 5, train_attn=False, train_unembed=False))
    (datum,) = sft(3, 12)
    datum.loss_inputs["routed_experts"] = np.tile(np.array([6, 2]), (12, 2, 1))
    ok(backend.run([train("m", [datum])]))
    state = saved(backend, "m", tmp_path)
    assert all(".experts." in name for name in state), "an adapter may train experts alone"
    gradient = state[f"gradient.{EXPERT}.up_proj.lora_B"]
    assert [number for number, of_expert in enumerate(gradient) if of_expert.any()] == [2, 6]


def test_numbers_that_are_not_finite_stay_with_their_tenant(tmp_path: Path) -> None:
    """Adapters with experts of several ranks, and one without, share rows of the same experts."""
    tenants = {"a": spec(8, 5), "plain": spec(8, 1, train_mlp=False), "b": spec(3, 7), "c": spec(16, 9)}
    states = []
    for broken in (False, True):
        backend = make_backend("mixture", merge=True, micro_batch_tokens=256)
        for name, of_tenant in tenants.items():
            backend.create_model(name, of_tenant)
            rank_of(backend).adapters[name].weights.add_(0.01)
        if broken:
            rank_of(backend).adapters["b"].weights.fill_(torch.nan)
        outcomes = backend.run([train(name, sft(1, 20)) for name in tenants])
        assert [isinstance(each, Exception) for each in outcomes] == [broken and name == "b" for name in tenants]
        states.append(saved(backend, "a", tmp_path / str(broken)) | saved(backend, "c", tmp_path / f"c-{broken}"))
    assert_close(states[0], states[1], 1e-5)


def test_where_the_operator_refuses_train_mlp_the_error_says_what_to_send_instead() -> None:
    backend = make_backend("mixture", **REFUSE)
    assert backend.limits.mixture == Mixture(layers=2, experts=8, per_token=2)
    with pytest.raises(InvalidRequest, match="lora_config.train_mlp: .* send train_mlp=False.*train_mlp_of_mixtures"):
        backend.create_model("m", spec())
    make_backend(**REFUSE).create_model("m", spec())


def test_the_operator_may_let_train_mlp_train_the_other_layers_and_a_metric_says_so(tmp_path: Path) -> None:
    backend = make_backend("mixture", **LEAVE_OUT)
    backend.create_model("default", spec(8, 1))
    backend.create_model("said", spec(8, 1, train_mlp=False))
    default, said = ok(backend.run([train("default", sft(2, 20)), train("said", sft(2, 20))]))
    assert default.metrics == {**said.metrics, FROZEN_EXPERTS: 1.0}
    assert_same(saved(backend, "default", tmp_path / "default"), saved(backend, "said", tmp_path / "said"))
    with pytest.raises(InvalidRequest, match="train_attn or train_unembed must be true"):
        backend.create_model("nothing", spec(train_attn=False, train_unembed=False))
    dense = make_backend(**LEAVE_OUT)
    dense.create_model("m", spec(train_attn=False, train_unembed=False))
    (result,) = ok(dense.run([train("m", sft(2, 20))]))
    assert FROZEN_EXPERTS not in result.metrics


@pytest.mark.parametrize(("options", "trains"), [({}, True), (LEAVE_OUT, False), (REFUSE, False)], ids=str)
def test_what_a_row_keeps_is_measured_with_experts_only_where_adapters_train_them(
    options: dict[str, Any], trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[Target] = []
    monkeypatch.setattr(BudgetSettings, "measures_on", lambda *_: True)
    monkeypatch.setattr(rank_module, "measure_row", lambda base, targets: probed.extend(targets))
    make_backend("mixture", **options)
    assert probed
    assert any(target.experts is not None for target in probed) == trains


@pytest.fixture
def divided() -> Iterator[Make]:
    """Ranks that hold experts; with `rank_class=LoraRank`, ranks that gather them. Closed at the end."""
    with closed_at_end(EXPERTS.backend) as make:
        yield make


class Together(ExpertRank):
    """Computes the entries of all ranks in the same products, as on GPUs."""

    def load(self) -> Any:
        facts = super().load()
        assert self._model.exchange is not None
        self._model.exchange.together = True
        return facts


GATHERING: dict[str, Any] = {"rank_class": LoraRank, "placement.expert_parallel": False}


class Measures(ExpertRank):
    """Measures what a row keeps before the first pass, as on GPUs."""

    def load(self) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(BudgetSettings, "measures_on", lambda *_: True)
            return super().load()


def _state(backend: Any, directory: Path, *lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """After a step and a pass."""
    backend.create_model("m", spec(8, 1))
    for number, each in enumerate(lengths):
        ok(backend.run([train("m", sft(2 + number, *each))]))
        if number + 1 < len(lengths):
            backend.optim_step("m", STEP)
    return saved(backend, "m", directory)


@pytest.mark.parametrize(
    ("count", "merge"),
    [(2, True), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(3, False, marks=pytest.mark.slow)],
)
def test_passes_have_the_bits_of_ranks_that_gather_experts(
    tmp_path: Path, divided: Make, count: int, merge: bool
) -> None:
    """Losses, logprobs and gradients; also where adapters share micro-batches."""
    specs = {"all": spec(8, 1), "experts": spec(3, 2, train_attn=False, train_unembed=False)}
    runs = []
    for number, options in enumerate(({}, GATHERING)):
        backend = divided(
            count, architecture="mixture-of-wide-experts", merge_passes=merge, micro_batch_tokens=96, **options
        )
        for model_id, each in specs.items():
            backend.create_model(model_id, each)
        results = ok(backend.run([each for model_id in specs for each in passes_of(EXPERTS, model_id, 0)]))
        runs.append((results, {name: saved(backend, name, tmp_path / f"{number}-{name}") for name in specs}))
    assert_same_results(runs[0][0], runs[1][0])
    for name in specs:
        assert_same(runs[0][1][name], runs[1][1][name])


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (3, {"gradient_checkpointing": True}),
        pytest.param(2, {"merge_passes": True}, marks=pytest.mark.slow),
        pytest.param(2, {"rank_class": Together}, marks=pytest.mark.slow),
        pytest.param(3, {"rank_class": Together, "context_parallel_tokens": None}, marks=pytest.mark.slow),
    ],
    ids=["three", "merged", "together", "together-undivided"],
)
def test_rows_of_a_divided_sequence_travel_to_their_experts(
    tmp_path: Path, divided: Make, count: int, settings: dict[str, Any]
) -> None:
    """Long sequences alone and beside short ones, with recorded experts, and a forward; the same bits again."""
    passes = [
        train("m", sft(1, 101)),
        train("m", with_experts(sft(2, 7, 90, 31), 0)),
        TrainingPass("m", sft(4, 55, 20), "cross_entropy", backward=False),
    ]
    ranks = divided(count, **{"context_parallel_tokens": 48, **settings})
    states: list[dict[str, Tensor]] = []
    for name, backend in (("one", divided()), ("ranks", ranks), ("again", ranks)):
        backend.create_model("m", spec(8, 1))
        ok(backend.run(passes))
        backend.optim_step("m", STEP)
        ok(backend.run(passes))
        states.append(saved(backend, "m", tmp_path / name))
        backend.delete_model("m")
    assert_close(states[1], states[0], EXPERTS.tolerance)
    assert_same(states[2], states[1])


def test_ranks_that_hold_experts_measure_what_a_row_keeps(divided: Make) -> None:
    backend = divided(2, rank_class=Measures, micro_batch_tokens=None)
    backend.create_model("m", spec(8, 1))
    ok(backend.run([train("m", sft(1, 20, 9))]))


def test_each_rank_holds_its_experts_and_what_adapters_have_of_them(divided: Make) -> None:
    backend = divided(3)
    backend.create_model("experts", spec(3, 2, train_attn=False, train_unembed=False))
    facts = backend.group.call("memory")
    assert sum(each["parameters"] for each in facts) == facts[0]["all_parameters"]
    of_expert, layers = 3 * 48 * 24, 2
    held = [(each["parameters"] - facts[0]["parameters"]) / of_expert for each in facts]
    np.testing.assert_allclose(held, [0, layers, layers], atol=0.2)  # 2, 3 and 3 of the 8 experts
    numbers = [len(arrays[0]) for arrays, _ in backend.group.call("export", "experts", False)]
    assert [8 * number / sum(numbers) for number in numbers] == [2, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("divides_sequences", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_every_family_of_mixtures_can_be_divided(
    tmp_path: Path, divided: Make, family: str, divides_sequences: bool
) -> None:
    """Also a number of experts that the ranks do not divide; against one device, and ranks that gather experts."""
    path, lengths = make_family(family, tmp_path), ((9, 70, 4), (60,))
    options: dict[str, Any] = {"path": path}
    if divides_sequences:
        options["context_parallel_tokens"] = 48
    others = divided(3, **options, **GATHERING) if divides_sequences else divided(1, path=path)
    found = _state(divided(3, **options), tmp_path / "divided", *lengths)
    assert_close(found, _state(others, tmp_path / "other", *lengths), 1e-4)


def test_ranks_read_their_experts_of_a_quantized_release(tmp_path: Path, divided: Make) -> None:
    path = quantize(make_family("gpt-oss", tmp_path), tmp_path / "release", MXFP4, mxfp4)
    one, ranks = (_state(divided(count, path=path), tmp_path / str(count), (9, 30, 4)) for count in (1, 2))
    assert_close(ranks, one, EXPERTS.tolerance)


def test_experts_are_divided_only_over_ranks_that_train_adapters() -> None:
    key = {"trainer.placement.expert_parallel": True}
    for placed in ({}, {"trainer.placement.policy_num_cpu_ranks": 1}):
        with pytest.raises(ConfigError, match=r"expert_parallel: experts are divided .* policy_num_cpu_ranks to 2 or"):
            load_config({"backend_config": key | placed})
    both = {**key, "trainer.placement.policy_num_cpu_ranks": 2, "trainer.full_finetuning": True}
    with pytest.raises(ConfigError, match=r"expert_parallel: with trainer\.full_finetuning"):
        load_config({"backend_config": both})
