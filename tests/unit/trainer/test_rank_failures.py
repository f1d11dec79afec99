"""Ranks that die, hang, run out of memory or compute something else; base models that ranks cannot load."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch_lora_support import assert_same, base_path, make_ranks, ok, rl, saved, sft, spec, train

from skyrl.base.config.server import ConfigError
from skyrl.trainer import adamw
from skyrl.trainer.losses import Loss, LossInputs, LossValue
from skyrl.trainer.protocol import AdamParams, Datum, InvalidRequest, OutOfMemory, PassResult, RankDied
from skyrl.trainer.ranks import lora_rank as rank_module
from skyrl.trainer.ranks import plan
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.ranks.lora_rank import LoraRank
from skyrl.trainer.ranks.rank import RankSettings
from skyrl.trainer.rows.prefixes import PrefixTree, prefix_tree
from tests.local_ranks import LocalRanks

STEP = AdamParams(learning_rate=1e-2)
SHORT_S = 6.0
"""Longer than the slowest step of a healthy rank on a busy machine."""
LONG_S = 300.0
SPEC = spec(4, 1)


def _broken_loss(lp: Tensor, inputs: LossInputs, config: object) -> LossValue:
    raise RuntimeError("this loss fails on rank 1")


class LossFailsOnRankOne(LoraRank):
    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        super().__init__(rank, ranks, settings)
        if rank == 1:
            self._losses["importance_sampling"] = Loss(_broken_loss, ("logprobs", "advantages"))


class NoMemoryOnRankOne(LoraRank):
    """Every second attempt to add, replace or step an adapter finds no memory on rank 1."""

    def __init__(self, rank: int, ranks: int, settings: RankSettings) -> None:
        super().__init__(rank, ranks, settings)
        if rank == 1:
            for module, name in ((rank_module, "Adapter"), (adamw, "memory_for_step")):
                setattr(module, name, _every_second_time(getattr(module, name)))
            self._copied = _every_second_time(self._copied)  # type: ignore[method-assign]


def _every_second_time(function: Any) -> Any:
    calls: list[int] = []

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) % 2:
            raise torch.OutOfMemoryError("no memory left")
        return function(*arguments, **named)

    return call


class OtherGradientOnRankOne(LoraRank):
    def clear_gradient(self, model_id: str) -> None:
        gradient = self.adapters[model_id].gradient
        if self._rank == 1 and gradient is not None:
            gradient[0] += 1e-3


class RaisesOnRankOne(LoraRank):
    """A failure in the middle of a micro-batch, where the other rank waits."""

    def _beside_others(self, *arguments: Any, **named: Any) -> Any:
        if self._rank == 1:
            raise torch.OutOfMemoryError("no memory left")
        return super()._beside_others(*arguments, **named)


@pytest.fixture
def made() -> Iterator[list[LoraBackend]]:
    """Backends that the test has made; closed at its end."""
    backends: list[LoraBackend] = []
    yield backends
    for backend in backends:
        backend.close()


def _backend(made: list[LoraBackend], **settings: Any) -> LoraBackend:
    """Two ranks with a model "m" that has a pending gradient."""
    backend = make_ranks(2, **settings)
    made.append(backend)
    backend.create_model("m", SPEC)
    ok(backend.run([train("m", sft(1, 20, 9))]))
    return backend


def _pids(backend: LoraBackend) -> list[int]:
    assert isinstance(backend.group, LocalRanks)
    return backend.group.pids


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(
    "idle", [pytest.param(True, id="idle", marks=pytest.mark.slow), pytest.param(False, id="running")]
)
def test_a_rank_that_is_killed_or_stopped_is_found_within_the_timeout(
    made: list[LoraBackend], kind: signal.Signals, victim: int, idle: bool
) -> None:
    timeout_s = LONG_S if kind == signal.SIGKILL else SHORT_S
    backend = _backend(made, timeout_s=timeout_s)
    passes = [train("m", sft(seed, *[60] * 30)) for seed in range(4)]  # fits the socket of a stopped rank

    def strike() -> None:
        if not idle:
            time.sleep(0.3)
        os.kill(_pids(backend)[victim], kind)

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


def test_an_error_on_one_rank_in_the_middle_of_a_pass_ends_the_group(made: list[LoraBackend]) -> None:
    made.append(make_ranks(2, rank_class=RaisesOnRankOne, timeout_s=SHORT_S))
    made[0].create_model("m", SPEC)
    with pytest.raises(RankDied, match="rank 1: OutOfMemoryError: no memory left"):
        made[0].run([train("m", sft(1, 20, 9))])


def test_a_loss_that_raises_on_one_rank_fails_its_pass_alone(made: list[LoraBackend], tmp_path: Path) -> None:
    broken, whole = _backend(made, rank_class=LossFailsOnRankOne), _backend(made)
    good, bad = train("m", rl(1, 30, 30, 30), "ppo"), train("m", rl(2, 30, 30, 30), "importance_sampling")
    outcomes = broken.run([good, bad, good])
    assert [type(each) for each in outcomes] == [PassResult, RuntimeError, PassResult]
    assert "this loss fails on rank 1" in str(outcomes[1])
    ok(whole.run([good, good]))
    assert_same(saved(broken, "m", tmp_path / "broken"), saved(whole, "m", tmp_path / "whole"))


def test_no_memory_for_the_prefixes_of_a_pass_fails_that_pass_alone(
    made: list[LoraBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = _backend(made)
    backend.clear_gradient("m")
    passes = [train("m", sft(0, 9, 20)), train("m", rl(1, 30, 9), "ppo"), train("m", sft(2, 12))]

    def short(data: Sequence[Datum]) -> PrefixTree:
        if data is passes[1].data:
            raise MemoryError("no memory left")
        return prefix_tree(data)

    monkeypatch.setattr(plan, "prefix_tree", short)
    first, failed, last = backend.run(passes)
    assert isinstance(failed, OutOfMemory)
    ok([first, last])
    state = saved(backend, "m", tmp_path / "with")
    backend.clear_gradient("m")
    ok(backend.run([passes[0], passes[2]]))
    assert_same(state, saved(backend, "m", tmp_path / "without"))


def test_memory_that_runs_out_on_one_rank_changes_nothing_on_any(made: list[LoraBackend], tmp_path: Path) -> None:
    backend = make_ranks(2, rank_class=NoMemoryOnRankOne)
    made.append(backend)
    with pytest.raises(OutOfMemory):
        backend.create_model("m", SPEC)
    backend.create_model("m", SPEC)
    ok(backend.run([train("m", sft(1, 20, 9))]))
    before = saved(backend, "m", tmp_path / "before")
    with pytest.raises(OutOfMemory):
        backend.optim_step("m", STEP)
    with pytest.raises(OutOfMemory):
        backend.load_state("m", tmp_path / "before", optimizer=True)
    assert_same(saved(backend, "m", tmp_path / "after"), before)
    assert backend.optim_step("m", STEP)["optimizer_step"] == 1
    undisturbed = _backend(made)
    undisturbed.optim_step("m", STEP)
    assert_same(saved(backend, "m", tmp_path / "stepped"), saved(undisturbed, "m", tmp_path / "undisturbed"))


def test_a_model_that_is_deleted_while_a_save_waits_fails_the_save_alone(
    made: list[LoraBackend], tmp_path: Path
) -> None:
    backend = _backend(made)
    known = backend._models["m"]
    backend.delete_model("m")
    backend._models["m"] = known  # as the save has seen it
    with pytest.raises(InvalidRequest, match="there is no model m"):
        backend.save_adapter("m", tmp_path)
    del backend._models["m"]
    backend.create_model("m", SPEC)


def test_ranks_that_compute_different_weights_end(made: list[LoraBackend]) -> None:
    backend = _backend(made, rank_class=OtherGradientOnRankOne)
    backend.clear_gradient("m")
    with pytest.raises(RankDied, match="the ranks have computed different weights"):
        backend.optim_step("m", STEP)


def _copy_of_base(directory: Path, architecture: str = "qwen3") -> tuple[Path, dict[str, Tensor]]:
    path = Path(shutil.copytree(base_path(architecture), directory / "base"))
    return path, load_file(path / "model.safetensors")


def _write_shards(path: Path, *shards: dict[str, Tensor]) -> None:
    (path / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = f"model-{number}.safetensors"
        save_file(shard, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_base_model_in_several_files_is_read(made: list[LoraBackend], tmp_path: Path) -> None:
    path, tensors = _copy_of_base(tmp_path)
    names = sorted(tensors)
    _write_shards(path, {n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]})
    data = [train("m", sft(3, 30, 9, 4))]
    results = []
    for each in (str(path), base_path()):
        backend = make_ranks(2, path=each)
        made.append(backend)
        backend.create_model("m", SPEC)
        results.append(ok(backend.run(data))[0].metrics)
    assert results[0] == results[1]


def _refused(path: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_ranks(2, path=str(path))


def test_base_models_that_ranks_cannot_load_are_refused_by_name(tmp_path: Path) -> None:
    path, tensors = _copy_of_base(tmp_path)
    _refused(tmp_path / "missing", "base_model: cannot load")
    dropped = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != dropped}, path / "model.safetensors")
    _refused(path, f"the files lack {dropped}")
    save_file(tensors | {dropped: torch.zeros(3, 4)}, path / "model.safetensors")
    _refused(path, rf"the files hold {dropped} with shape \[3, 4\]")
    _write_shards(path, tensors)
    (path / "model-0.safetensors").unlink()
    _refused(path, "model-0.safetensors of the weight_map of")
    (path / "model.safetensors.index.json").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    _refused(path, "has neither model.safetensors nor")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    _refused(path, "config.json's quantization_config.weight_block_size is None")


def test_tied_embeddings_may_be_stored_under_either_name_but_not_with_two_values(
    made: list[LoraBackend], tmp_path: Path
) -> None:
    path, tensors = _copy_of_base(tmp_path, "qwen3-tied")
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    results = []
    for stored in (tensors, {head if k == embed else k: v for k, v in tensors.items()}):
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
        with closing(make_ranks(2, path=str(path))) as backend:
            backend.create_model("m", SPEC)
            results.append(ok(backend.run([train("m", sft(3, 30, 9))]))[0].metrics)
    assert results[0] == results[1]
    save_file(tensors | {head: tensors[embed] + 1}, path / "model.safetensors", metadata={"format": "pt"})
    _refused(path, "tie_word_embeddings is true, and the files hold another tensor as lm_head.weight")
