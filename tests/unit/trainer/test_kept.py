"""What only weights that stay quantized promise: the bits of weights computed at loading, in the files' memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kept_support import CASES, release
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch_lora_support import base_path, files_saved, ok, sft, spec, train
from trainer_kinds import EXPERTS, LORA, STEP, Kind, Run, assert_same_runs, closed_at_end, slow

from skyrl.base.config.loading import load_config
from skyrl.base.config.pass_memory import ON_CPU
from skyrl.base.config.server import ConfigError
from skyrl.trainer.model import row_budget
from skyrl.trainer.model.loading import load_model
from skyrl.trainer.quantized.weights import QuantizedSlice, QuantizedWeight, held_bytes
from skyrl.trainer.ranks.lora_rank import AdapterFacts, LoraRank
from skyrl.trainer.ranks.plan import Plan
from tests.families import FAMILIES, MIXTURES, make_family
from tests.local_ranks import rank_of
from tests.quantized import FP8, block_fp8, quantize

Make = Callable[..., Any]
PASSES = [train("m", sft(0, 12, 30, 9)), train("m", sft(10, 40))]


@pytest.fixture
def kept() -> Iterator[Make]:
    """One rank on a release, or more; closed at the end."""
    with closed_at_end(
        lambda path, ranks=1, kind=LORA, keep=True, **options: kind.backend(
            ranks, path=path, keep_quantized=keep, **options
        )
    ) as make:
        yield make


def _learn(backend: Any, directory: Path) -> Run:
    backend.create_model("m", spec(4, 1))
    results = ok(backend.run(PASSES))
    metrics = [backend.optim_step("m", STEP)]
    return Run(results + ok(backend.run(PASSES)), metrics, files_saved(backend, "m", directory))


@pytest.mark.parametrize(
    ("case", "ranks", "kind", "settings"),
    [
        *((case, 1, LORA, {}) for case in CASES),
        ("fused-mixture-mxfp4", 1, LORA, {"gradient_checkpointing": True, "merge_passes": True}),
        ("dense-int4", 2, LORA, {"gradient_checkpointing": True}),
        ("mixture-fp8", 2, EXPERTS, {}),
        slow("dense-int4", 3, LORA, {"merge_passes": True}),
        slow("dense-int4", 2, LORA, {"context_parallel_tokens": 32}),
        slow("mixture-fp8", 2, LORA, {"context_parallel_tokens": 32, "gradient_checkpointing": True}),
        slow("latent-mixture-int4", 2, EXPERTS, {"context_parallel_tokens": 32}),
        *(slow(case, count, LORA, {}) for case in CASES for count in (2, 3)),
        *(slow(case, count, EXPERTS, {}) for case in CASES if "mixture" in case for count in (2, 3)),
    ],
    ids=str,
)
def test_training_gives_the_bits_of_weights_computed_at_loading(
    tmp_path: Path, kept: Make, case: str, ranks: int, kind: Kind, settings: dict[str, Any]
) -> None:
    """So a snapshot goes on with and without kept weights, too."""
    path = release(case, tmp_path)
    backends = [kept(path, ranks, kind, keep=keep, **settings) for keep in (True, False)]
    runs = [_learn(backend, tmp_path / str(number)) for number, backend in enumerate(backends)]
    assert_same_runs(*runs)
    of_kept, of_computed = (backend.group.call("memory") for backend in backends)
    for own, other in zip(of_kept, of_computed, strict=True):
        assert (own["parameters"], own["all_parameters"]) == (other["parameters"], other["all_parameters"])
    assert sum(each["held"] for each in of_kept) < 0.5 * sum(each["held"] for each in of_computed)


def test_the_rows_of_a_micro_batch_follow_the_memory_beside_kept_weights(
    tmp_path: Path, kept: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = release("dense-int4", tmp_path)
    rank = rank_of(kept(path))
    needed = 4096 * rank.base.packed.recomputation.bytes_of_row / ON_CPU.share
    monkeypatch.setattr(row_budget, "limit_bytes", lambda: rank.memory()["held"] + 1.0001 * needed)
    found = [kept(path, keep=keep, micro_batch_tokens=None).micro_batch_tokens for keep in (True, False)]
    assert found == [4096, 2048]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_every_family_gives_the_bits_of_weights_computed_at_loading(tmp_path: Path, kept: Make, family: str) -> None:
    path = quantize(make_family(family, tmp_path), tmp_path / "release", FP8, block_fp8())
    assert_same_runs(*(_learn(kept(path, 2, keep=keep), tmp_path / str(keep)) for keep in (True, False)))


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_computed_at_loading_and_take_the_bits_of_the_files(case: str, tmp_path: Path) -> None:
    path = release(case, tmp_path)
    model, computed = load_model(path, torch.float32, keep_quantized=True), load_model(path, torch.float32)
    model.requires_grad_(False)
    bits = 0.0
    for (name, ours), theirs in zip(model.named_parameters(), computed.parameters(), strict=True):
        assert ours.shape == theirs.shape
        if not isinstance(ours, QuantizedWeight):
            assert torch.equal(ours, theirs), name
            continue
        assert torch.equal(ours.whole(), theirs), name
        bits = max(bits, 8 * held_bytes([ours]) / ours.numel())
    assert 4 < bits < 9, "4 or 8 bits for a number, and some for factors"
    experts = [each for name, each in model.named_parameters() if ".experts." in name and each.ndim == 3]
    assert all(isinstance(each, QuantizedWeight) for each in experts), "the experts of all cases are quantized"


def test_nothing_of_the_size_of_a_weight_is_kept_for_the_backward(tmp_path: Path, kept: Make) -> None:
    """Beside quantized weights, only activations: all have the micro-batch's 40 rows."""
    backend = kept(release("dense-int4", tmp_path), gradient_checkpointing=False)
    backend.create_model("m", spec(4, 1))
    held: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: (held.append(tensor), tensor)[1], lambda tensor: tensor):
        ok(backend.run([train("m", sft(0, 40))]))
    packed = rank_of(backend).base.packed
    smallest = min(each.numel() for each in packed.parameters() if isinstance(each, QuantizedWeight))
    quantized = [each for each in held if isinstance(each, QuantizedWeight)]
    assert len(quantized) >= 14, "seven projections of two layers"
    large = [each.shape for each in held if not isinstance(each, QuantizedWeight) and each.numel() >= smallest]
    assert all(shape == packed.lm_head.base.weight.shape or 40 in shape for shape in large), large


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_numbers_of_one_weight_live_at_a_time(
    tmp_path: Path, kept: Make, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = kept(release("mixture-fp8", tmp_path), gradient_checkpointing=recomputed)
    backend.create_model("m", spec(4, 1))
    whole, living, most, computed = QuantizedWeight.whole, [], 0, 0

    def noted(weight: QuantizedWeight) -> Tensor:
        nonlocal most, computed
        made = whole(weight)
        living[:] = [each for each in living if each() is not None] + [weakref.ref(made)]
        most, computed = max(most, len(living)), computed + 1
        return made

    monkeypatch.setattr(QuantizedWeight, "whole", noted)
    ok(backend.run([train("m", sft(0, 40))]))
    assert most == 1
    quantized = sum(isinstance(each, QuantizedWeight) for each in rank_of(backend).base.packed.parameters())
    assert computed >= (3 if recomputed else 2) * quantized - 3, "the first layer's inputs need no gradient"


def test_a_quantized_weight_is_never_changed(tmp_path: Path) -> None:
    model = load_model(release("dense-int4", tmp_path), torch.float32, keep_quantized=True)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert isinstance(weight, QuantizedWeight)
    for change in (lambda: weight.data.zero_(), lambda: weight.data.add_(1.0), lambda: weight.data.copy_(weight)):
        with pytest.raises(RuntimeError, match="would change a quantized weight"):
            change()
    assert torch.equal(weight.t().contiguous(), weight.whole().t())
    assert torch.equal(weight[3:5] + 1, weight.whole()[3:5] + 1), "other operations get its numbers"
    assert weight.to(torch.bfloat16).dtype == torch.bfloat16
    moved = weight.to("meta")
    assert isinstance(moved, QuantizedWeight)
    assert moved.pieces[0].numbers.device.type == "meta"


class Watched(LoraRank):
    """Fails if it computes a weight from the files, and counts the bytes that it gathers for passes."""

    def load(self) -> AdapterFacts:
        with pytest.MonkeyPatch.context() as patched:
            if self._settings.keep_quantized:
                patched.delattr(QuantizedSlice, "__getitem__")
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


def test_packed_bytes_are_read_and_gathered_and_nothing_of_a_layer_is_left(tmp_path: Path, kept: Make) -> None:
    path, gathered = release("dense-int4", tmp_path), []
    for keep in (False, True):
        backend = kept(path, 2, keep=keep, rank_class=Watched)
        backend.create_model("m", spec(4, 1))
        ok(backend.run(PASSES))
        gathered.append(backend.group.read("gathered"))
    assert backend.group.read("used_outside") == "weight_numbers0 is used where its layer is not gathered"
    assert gathered[1] < 0.3 * gathered[0], "embeddings, output layer and norms are in float32"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_is_not_quantized_is_refused_by_the_keys_name(kept: Make, ranks: int) -> None:
    with pytest.raises(ConfigError, match=rf"^trainer.keep_quantized: {base_path()} is not quantized: .* skyrl quanti"):
        kept(base_path(), ranks)


def test_ranks_that_train_all_parameters_keep_no_bits() -> None:
    key = {"trainer.placement.policy_num_cpu_ranks": 2, "trainer.keep_quantized": True}
    assert load_config({"backend_config": key}).backend_config.trainer.keep_quantized
    with pytest.raises(ConfigError, match=r"keep_quantized: with trainer\.full_finetuning weights change"):
        load_config({"backend_config": {**key, "trainer.full_finetuning": True}})
