"""What only several ranks promise: how they end when one dies, hangs or computes something else; that they decide
together; what each gathers and holds; and the arithmetic of GPUs, tried on CPUs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch_lora_support import VOCAB, base_path, files_saved, ok, sft, spec, stored_tensors, train
from trainer_kinds import EXPERTS, FULL, LORA, STEP, WHOLE, closed_at_end

from skyrl.base.config.server import ConfigError
from skyrl.trainer.lora.adapter import Target
from skyrl.trainer.model import base_model as model_module
from skyrl.trainer.model import logprobs as logprobs_module
from skyrl.trainer.model import recomputation
from skyrl.trainer.model.row_budget import RowBudget, measure_row
from skyrl.trainer.protocol import AdamParams, RankDied, TrainingPass
from skyrl.trainer.ranks import sharded_model
from skyrl.trainer.ranks.full_rank import FullRank
from skyrl.trainer.ranks.lora_rank import ExpertRank, LoraRank
from skyrl.trainer.ranks.rank import RankSettings
from tests.local_ranks import rank_of

SHORT_S = 6.0
"""Longer than the slowest step of a healthy rank on a busy machine."""
LONG_S = 300.0
Make = Callable[..., Any]


@pytest.fixture
def ranks() -> Iterator[Make]:
    """Two ranks that train adapters, or as many as are asked for; closed at the end."""
    with closed_at_end(lambda count=2, kind=LORA, **options: kind.backend(count, **options)) as make:
        yield make


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(
    "idle", [pytest.param(True, id="idle", marks=pytest.mark.slow), pytest.param(False, id="running")]
)
def test_a_rank_that_is_killed_or_stopped_is_found_within_the_timeout(
    ranks: Make, kind: signal.Signals, victim: int, idle: bool
) -> None:
    backend = ranks(rank_timeout_s=LONG_S if kind == signal.SIGKILL else SHORT_S)
    backend.create_model("m", spec(4, 1))
    ok(backend.run([train("m", sft(1, 20, 9))]))
    passes = [train("m", sft(seed, *[60] * 30)) for seed in range(4)]  # fits the socket of a stopped rank

    def strike() -> None:
        if not idle:
            time.sleep(0.3)
        os.kill(backend.group.pids[victim], kind)

    thread = threading.Thread(target=strike)
    thread.start()
    if idle:
        thread.join()
    began = time.monotonic()
    with pytest.raises(RankDied, match="rank [01]"):
        backend.run(passes)
    took_s = time.monotonic() - began
    assert took_s < LONG_S if kind == signal.SIGKILL else took_s > SHORT_S / 2
    thread.join()
    with pytest.raises(RankDied):
        backend.optim_step("m", STEP)


def _out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no memory left")


class RaisesOnRankOne(LoraRank):
    """A failure in the middle of a micro-batch, where the other rank waits."""

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        super().__init__(rank, ranks, settings)
        if rank:
            self._beside_others = _out_of_memory


class RaisesWhereRowsTravel(ExpertRank):
    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        super().__init__(rank, ranks, settings)
        if rank:
            self._backward = _out_of_memory


@pytest.mark.parametrize(("kind", "rank_class"), [(LORA, RaisesOnRankOne), (EXPERTS, RaisesWhereRowsTravel)], ids=str)
def test_an_error_on_one_rank_in_the_middle_of_a_pass_ends_the_group(ranks: Make, kind: Any, rank_class: Any) -> None:
    backend = ranks(kind=kind, rank_class=rank_class, rank_timeout_s=SHORT_S)
    backend.create_model("m", spec(4, 1))
    with pytest.raises(RankDied):
        backend.run([train("m", sft(1, 20, 9))])


class OtherGradientOnRankOne(LoraRank):
    def clear_gradient(self, model_id: str) -> None:
        gradient = self.adapters[model_id].gradient
        if self._rank == 1 and gradient is not None:
            gradient[0] += 1e-3


def test_ranks_that_compute_different_weights_end(ranks: Make) -> None:
    backend = ranks(rank_class=OtherGradientOnRankOne)
    backend.create_model("m", spec(4, 1))
    ok(backend.run([train("m", sft(1, 20, 9))]))
    backend.clear_gradient("m")
    with pytest.raises(RankDied, match="the ranks have computed different weights"):
        backend.optim_step("m", STEP)


class Unequal(LoraRank):
    """Rank 0 has no memory for activations, rank 1 has it for fewer rows, which each measures as on CUDA. Counts what
    FSDP2 gathers, with logits in chunks of 16 rows."""

    gathered = 0

    def load(self) -> Any:
        recomputation.FREE_ANYHOW = 0
        recomputation.free_host_bytes = lambda: 0.0 if self._rank == 0 else 1e15
        facts = super().load()
        module: Any = _fsdp_param_group
        gather = module.foreach_all_gather

        def counted(*arguments: Any) -> Any:
            self.gathered += 1
            return gather(*arguments)

        module.foreach_all_gather = counted
        logprobs_module.LOGITS_BYTES = 16 * VOCAB * 4
        return facts

    def _row_budget(self, targets: Sequence[Target]) -> RowBudget:
        measure_row(self.base, targets)
        self.base.packed.reshard()
        return RowBudget(512 >> self._rank, "a test")

    def count(self) -> tuple[int, set[bool]]:
        """How often was gathered, and whether a micro-batch's layers would be recomputed."""
        gathered, self.gathered = self.gathered, 0
        assert self.base.packed.recomputation is not None
        return gathered, {self.base.packed.recomputation.pays(rows) for rows in (1, 10_000)}


def test_ranks_take_the_smallest_budget_recompute_together_and_gather_each_layer_once(ranks: Make) -> None:
    """The two layers in forward and in backward, and the rest: whatever the segments, chunks and targets. A rank with
    nothing to do gathers as much."""
    backend = ranks(architecture="qwen3", rank_class=Unequal, merge_passes=True, micro_batch_tokens=None)
    assert backend.micro_batch_tokens == 256
    specs = {
        "all": spec(8, 1),
        "attention": spec(4, 2, train_mlp=False, train_unembed=False),
        "unembed": spec(2, 3, train_attn=False, train_mlp=False),
    }
    for model_id, each in specs.items():
        backend.create_model(model_id, each)
    backend.group.call("count")
    passes = [train(model_id, sft(1, 30, 30, 3)) for model_id in specs]
    for queue, expected in (
        (passes[:1], 5),
        (passes, 5),
        ([train("unembed", sft(1, 9))], 5),
        ([TrainingPass("all", sft(1, 30, 9), "cross_entropy", backward=False)], 3),
    ):
        ok(backend.run(queue))
        one, other = backend.group.call("count")
        assert one == other == (expected, {True})


class ComputesInBfloat16(FullRank):
    """Has the dtypes of a rank with a GPU, on a CPU."""

    def load(self) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            for module in (sharded_model, model_module):
                patched.setattr(module, "base_dtype", lambda device: torch.bfloat16)
            return super().load()


@pytest.mark.parametrize("count", [1, 2])
def test_computing_in_bfloat16_keeps_float32_weights_and_gradients(ranks: Make, tmp_path: Path, count: int) -> None:
    """Small steps add up, which they would not do in bfloat16."""
    rounded, exact = ranks(count, FULL, rank_class=ComputesInBfloat16), ranks(count, FULL)
    losses, states = [], []
    for number, backend in enumerate((rounded, exact)):
        backend.create_model("m", WHOLE)
        for _ in range(3):
            ok(backend.run([train("m", sft(1, 20, 9, 30))]))
            backend.optim_step("m", AdamParams(learning_rate=1e-5, eps=1e-3))
        losses.append(ok(backend.run([train("m", sft(1, 20, 9, 30))]))[0].metrics["loss:sum"])
        states.append(files_saved(backend, "m", tmp_path / str(number)))
    rounded.optim_step("m", STEP)
    rounded.load_state("m", tmp_path / "0", optimizer=False)
    (loaded,) = ok(rounded.run([train("m", sft(1, 20, 9, 30))]))
    assert loaded.metrics["loss:sum"] == losses[0], "the model computes with the weights that it has loaded"
    if count == 1:
        rank = rank_of(rounded)
        assert {each.dtype for each in rank.base.packed.parameters()} == {torch.bfloat16}
        assert rank.memory()["weights"] == 4 * rank.parameters("m").numel
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02, abs=0.5)
    base = stored_tensors(Path(FULL.base()))
    for name, value in states[0].items():
        expected = states[1][name]
        assert value.dtype == torch.float32
        if name in base:
            assert (value - base[name]).abs().max() < 4e-5
            assert _cosine(value - base[name], expected - base[name]) > 0.9, name
        elif name.startswith("gradient"):
            assert _cosine(value, expected) > 0.99, name
            assert not torch.equal(value, value.bfloat16().float()), "gradients are summed in float32"


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0))


def _metrics(ranks: Make, path: str) -> dict[str, float]:
    backend = ranks(path=path)
    backend.create_model("m", spec(4, 1))
    return ok(backend.run([train("m", sft(3, 30, 9, 4))]))[0].metrics


def test_base_models_in_several_files_or_tied_under_either_name_are_read(ranks: Make, tmp_path: Path) -> None:
    path = Path(shutil.copytree(base_path("qwen3-tied"), tmp_path / "base"))
    tensors = load_file(path / "model.safetensors")
    expected = _metrics(ranks, str(path))
    renamed = {"lm_head.weight" if k == "model.embed_tokens.weight" else k: v for k, v in tensors.items()}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    assert _metrics(ranks, str(path)) == expected
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in ("model-0.safetensors", "model-1.safetensors"):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert _metrics(ranks, str(path)) == expected


def test_base_models_that_ranks_cannot_load_are_refused_by_name(ranks: Make, tmp_path: Path) -> None:
    """test_bad_model_directories has all that may be wrong. Ranks take no pickles."""
    path = Path(shutil.copytree(base_path("mixture"), tmp_path / "base"))
    file = path / "model.safetensors"
    tensors = load_file(file)
    cases: list[tuple[dict[str, Tensor], str]] = [
        (
            {k: v for k, v in tensors.items() if "layers.1.self_attn.q_proj" not in k},
            r"lack model.layers.1.\S+q_proj.w",
        ),
        ({k: v for k, v in tensors.items() if ".experts.5." not in k}, r"experts.down_proj with shape \[7, 48, 24\]"),
    ]
    for changed, said in cases:
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=said):
            ranks(path=str(path))
    file.unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="has neither model.safetensors nor"):
        ranks(path=str(path))
    with pytest.raises(ConfigError, match=rf"expert_parallel: {base_path()} is no mixture of experts"):
        ranks(kind=EXPERTS, path=base_path())
