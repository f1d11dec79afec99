"""Ranks whose base stays in the bits of a quantized release: the bits of ranks that compute it at loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from kept_support import CASES, release
from rank_support import STEP, Run, assert_same_runs, closed_at_end, learn_together
from torch_lora_support import assert_same, base_path, make_ranks, ok, saved, sft, spec, train

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.trainer.protocol import TrainingPass
from skyrl.trainer.quantized.weights import QuantizedSlice, QuantizedWeight
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.ranks.lora_rank import AdapterFacts, ExpertRank, LoraRank
from skyrl.trainer.ranks.plan import Plan
from tests.families import FAMILIES, MIXTURES, make_family
from tests.quantized import FP8, block_fp8, quantize

Ranks = Callable[..., LoraBackend]
EXPERTS = {"rank_class": ExpertRank, "placement.expert_parallel": True, "placement.policy_num_cpu_ranks": 2}


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """`make_ranks`; closes the backends at the end."""
    with closed_at_end(make_ranks) as make:
        yield make


def _passes(model_id: str, step: int) -> list[TrainingPass]:
    return [train(model_id, sft(step, 12, 30, 9)), train(model_id, sft(10 + step, 40))]


def _learn(backend: Any, directory: Path) -> Run:
    return learn_together(backend, directory, {"m": spec(4, 1)}, _passes, steps=1)


def _slow(*parameters: Any) -> Any:
    return pytest.param(*parameters, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("case", "count", "settings"),
    [
        ("dense-int4", 2, {"gradient_checkpointing": True}),
        ("mixture-fp8", 3, EXPERTS),
        _slow("dense-int4", 3, {"merge": True}),
        _slow("dense-int4", 2, {"context_parallel_tokens": 32}),
        _slow("mixture-fp8", 2, {"context_parallel_tokens": 32, "gradient_checkpointing": True}),
        _slow("latent-mixture-int4", 2, {"context_parallel_tokens": 32, **EXPERTS}),
        *(_slow(case, count, {}) for case in CASES for count in (2, 3)),
        *(_slow(case, count, EXPERTS) for case in CASES if "mixture" in case for count in (2, 3)),
    ],
)
def test_ranks_give_the_bits_of_weights_computed_at_loading(
    tmp_path: Path, ranks: Ranks, case: str, count: int, settings: dict[str, Any]
) -> None:
    path = release(case, tmp_path)
    computed, kept = (ranks(count, path=path, keep_quantized=keep, **settings) for keep in (False, True))
    assert_same_runs(_learn(kept, tmp_path / "kept"), _learn(computed, tmp_path / "computed"))
    of_kept, of_computed = kept.group.call("memory"), computed.group.call("memory")
    for own, other in zip(of_kept, of_computed, strict=True):
        assert (own["parameters"], own["all_parameters"]) == (other["parameters"], other["all_parameters"])
    assert sum(each["held"] for each in of_kept) < 0.5 * sum(each["held"] for each in of_computed)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_every_family_gives_the_bits_of_weights_computed_at_loading(tmp_path: Path, ranks: Ranks, family: str) -> None:
    path = quantize(make_family(family, tmp_path), tmp_path / "release", FP8, block_fp8())
    kept, computed = (_learn(ranks(2, path=path, keep_quantized=keep), tmp_path / str(keep)) for keep in (True, False))
    assert_same_runs(kept, computed)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, EXPERTS], ids=["gather", "hold-experts"])
def test_a_snapshot_goes_on_with_the_same_bits_with_and_without_kept_weights(
    tmp_path: Path, ranks: Ranks, settings: dict[str, Any]
) -> None:
    path = release("mixture-fp8", tmp_path)
    backend = ranks(2, path=path, keep_quantized=True, **settings)
    _learn(backend, tmp_path / "before")
    (tmp_path / "snapshot").mkdir()
    backend.save_snapshot("m", tmp_path / "snapshot")
    backend.optim_step("m", STEP)
    expected = saved(backend, "m", tmp_path / "expected")
    for keep in (True, False):
        again = ranks(2, path=path, keep_quantized=keep, **settings)
        again.restore_model("m", spec(4, 1), tmp_path / "snapshot")
        again.optim_step("m", STEP)
        assert_same(saved(again, "m", tmp_path / f"kept-{keep}"), expected)


class Watched(LoraRank):
    """Fails if it computes a weight from the files, and counts the bytes that it gathers for passes."""

    def load(self) -> AdapterFacts:
        with pytest.MonkeyPatch.context() as patched:
            if self._settings.keep_quantized:
                patched.setattr(QuantizedSlice, "__getitem__", _computed)
            return super().load()

    def run(self, passes: Any, forwards: Plan, backwards: Plan) -> Any:
        self._gathered = 0
        with pytest.MonkeyPatch.context() as patched:
            for name in ("all_gather_single", "all_gather_into_tensor"):  # the first: its name as of torch 2.13
                if hasattr(dist, name):
                    patched.setattr(dist, name, self._counted(getattr(dist, name)))
            return super().run(passes, forwards, backwards)

    def _counted(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self._gathered += (arguments[0] if arguments else named["output_tensor"]).nbytes
            return gather(*arguments, **named)

        return counted

    def gathered(self) -> int:
        return self._gathered

    def used_outside(self) -> str:
        """What using a weight of a layer gives while the layer is not gathered."""
        weight = next(iter(self.base.packed.linears.values())).weight
        assert isinstance(weight, QuantizedWeight)
        try:
            return str(weight + 1)
        except RuntimeError as error:
            return str(error)


def _computed(stored: QuantizedSlice, rows: object) -> None:
    raise AssertionError(f"{stored.name} is computed at loading")


def test_packed_bytes_are_read_and_gathered_and_nothing_of_a_layer_is_left(tmp_path: Path, ranks: Ranks) -> None:
    path = release("dense-int4", tmp_path)
    gathered: list[int] = []
    for keep in (False, True):
        backend = ranks(2, path=path, keep_quantized=keep, rank_class=Watched)
        backend.create_model("m", spec(4, 1))
        ok(backend.run(_passes("m", 0)))
        gathered.append(backend.group.read("gathered"))
        if keep:
            assert backend.group.read("used_outside") == "weight_numbers0 is used where its layer is not gathered"
    assert gathered[1] < 0.3 * gathered[0], "embeddings, output layer and norms are in float32"


def test_a_model_that_is_not_quantized_is_refused_by_the_keys_name() -> None:
    with pytest.raises(ConfigError, match=rf"^trainer.keep_quantized: {base_path()} is not quantized: .* skyrl quanti"):
        make_ranks(2, keep_quantized=True)


def test_ranks_that_train_all_parameters_keep_no_bits() -> None:
    key = {"trainer.placement.policy_num_cpu_ranks": 2, "trainer.keep_quantized": True}
    assert load_config({"backend_config": key}).backend_config.trainer.keep_quantized
    with pytest.raises(ConfigError, match=r"keep_quantized: with trainer\.full_finetuning weights change"):
        load_config({"backend_config": {**key, "trainer.full_finetuning": True}})
