"""How many rows a micro-batch may have, where the configuration does not say it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch_lora_support import base_path, make_backend, make_full, ok, sft, spec, train

from skyrl.base.config.loading import load_config
from skyrl.base.config.pass_memory import (
    LOGITS_BYTES,
    LOGITS_CHUNKS,
    MOST_LOGITS_BYTES,
    ON_CPU,
    ON_CUDA,
    logits_bytes_on_cuda,
    rows_within,
)
from skyrl.trainer.model import recomputation, row_budget
from skyrl.trainer.model.row_budget import BudgetSettings, RowBudget, measure_row
from skyrl.trainer.ranks.full_backend import FullBackend
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.local_ranks import rank_of


def _unset(**trainer: Any) -> Any:
    settings = {f"trainer.{key}": value for key, value in trainer.items()}
    return load_config({"base_model": base_path(), "backend_config": settings})


def _of(backend: Any) -> recomputation.Recomputation:
    return (rank_of(backend).base).packed.recomputation


def test_the_rows_are_the_largest_power_of_two_that_keeps_its_share_of_the_memory() -> None:
    of_row = 1e6
    needed = 16_384 * of_row / ON_CUDA.share
    assert rows_within(1.001 * needed, of_row, ON_CUDA) == 16_384
    assert rows_within(0.999 * needed, of_row, ON_CUDA) == 8192
    assert rows_within(1e15, of_row, ON_CUDA) == 65_536
    assert rows_within(-1.0, of_row, ON_CUDA) == 4096, "smaller ones would only be slower: layers are recomputed"
    assert rows_within(1e15, of_row, ON_CPU) == 4096
    assert rows_within(0.0, of_row, ON_CPU) == 2048


def test_a_full_micro_batch_of_the_gpus_budget_is_not_recomputed_while_half_of_the_rest_is_free() -> None:
    """A third of the memory is less than half of what is left when adapters have taken a fourth of it."""
    assert ON_CUDA.share < recomputation.SHARE * 0.75


def test_a_chunk_of_logits_on_cuda_has_two_thousand_rows_of_a_large_vocabulary_where_there_is_memory() -> None:
    of_row = 4 * 151_936
    assert 2000 < logits_bytes_on_cuda(60e9) // of_row < 2300, "80 GB, of which the model has 20"
    assert 1000 < logits_bytes_on_cuda(22e9) // of_row < 1200, "24 GB"
    assert logits_bytes_on_cuda(1e12) == MOST_LOGITS_BYTES
    assert logits_bytes_on_cuda(1e9) == logits_bytes_on_cuda(-1.0) == LOGITS_BYTES


@pytest.mark.parametrize("given", [None, 48])
def test_on_cuda_rows_and_chunks_of_logits_share_what_the_model_leaves(
    monkeypatch: pytest.MonkeyPatch, given: int | None
) -> None:
    """Half of 64 GB is a vLLM's, and 2 GB the model's. A number of rows that is given changes no chunk."""
    cuda = SimpleNamespace(
        get_device_properties=lambda _: SimpleNamespace(total_memory=64e9), memory_allocated=lambda _: 2e9
    )
    monkeypatch.setattr(row_budget, "torch", SimpleNamespace(cuda=cuda))
    parameters = [SimpleNamespace(device=torch.device("cuda"))]
    own = SimpleNamespace(free=lambda: 60e9, bytes_of_row=1e6)
    packed: Any = SimpleNamespace(recomputation=own, parameters=lambda: iter(parameters))
    settings = BudgetSettings(given, full=False, of_samplers=0.5, takes_turns=False)
    chunk = int(30e9 / 32)
    assert settings.logits_bytes(packed, 1) == logits_bytes_on_cuda(30e9) == chunk
    rows = settings.of_model(packed, 1, 0).rows
    assert rows == (given or rows_within(30e9 - LOGITS_CHUNKS * chunk, 1e6, ON_CUDA))


def test_a_given_number_is_obeyed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert make_backend(micro_batch_tokens=48).micro_batch_tokens == 48
    assert "a micro-batch has at most 48 rows (trainer.micro_batch_tokens)" in caplog.text


@pytest.mark.parametrize("backend_class", [LoraBackend, FullBackend])
def test_on_a_cpu_the_number_follows_the_memory_that_there_is_and_not_what_is_free_now(
    backend_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that starts again after a crash cuts its passes at the same places."""
    caplog.set_level(logging.INFO)
    config = _unset(full_finetuning=backend_class is FullBackend)
    backend = backend_class(config)
    assert backend.micro_batch_tokens == 4096
    parameters = list((rank_of(backend).base).packed.parameters())
    of_model = (4 if backend_class is LoraBackend else 16) * sum(each.numel() for each in parameters)
    needed = 4096 * _of(backend).bytes_of_row / ON_CPU.share
    monkeypatch.setattr(row_budget, "limit_bytes", lambda: of_model + 1.001 * needed)
    monkeypatch.setattr(recomputation, "free_host_bytes", lambda: 0.0)
    assert backend_class(config).micro_batch_tokens == 4096
    monkeypatch.setattr(row_budget, "limit_bytes", lambda: of_model + 0.999 * needed)
    assert backend_class(config).micro_batch_tokens == 2048
    assert "a micro-batch has at most 2048 rows (about 0.01 MB a row, 0.1 GB" in caplog.text


def test_layers_that_are_always_recomputed_keep_less_for_a_row() -> None:
    kept, recomputed = (_of(make_backend(gradient_checkpointing=value)).bytes_of_row for value in (False, True))
    inputs = 2 * 4 * 48
    """Of two layers."""
    assert recomputed == inputs + kept / 2


@pytest.mark.parametrize("make", [make_backend, make_full])
@pytest.mark.parametrize("setting", ["auto", False])
def test_the_probe_finds_what_a_row_of_training_keeps_and_changes_nothing(make: Any, setting: Any) -> None:
    backend, other = (make(micro_batch_tokens=4096, gradient_checkpointing=setting) for _ in range(2))
    base = rank_of(backend).base
    measure_row(base, base.targets if make is make_backend else ())
    results = []
    for each in (backend, other):
        each.create_model("m", spec(8) if make is make_backend else spec(0))
        results.append(ok(each.run([train("m", sft(0, 64, 64, 64, 64))])))
    assert _of(backend).bytes_of_row == pytest.approx(_of(other).bytes_of_row, rel=0.02)
    assert [each.metrics for each in results[0]] == [each.metrics for each in results[1]]


def test_the_smallest_budget_of_several_is_chosen() -> None:
    settings = BudgetSettings.of(_unset())
    assert settings.chosen([RowBudget(4096, "rank 0"), RowBudget(2048, "rank 1")]) == 2048


def test_a_vllm_on_the_same_gpu_keeps_its_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it still starts, when its memory looks free."""
    monkeypatch.setattr(row_budget.torch.cuda, "device_count", lambda: 1)
    assert BudgetSettings.of(_unset()).of_samplers == 0.5
    assert BudgetSettings.of(_unset(**{"placement.colocate_all": True})).of_samplers == 0
    assert BudgetSettings.of(_unset(**{"placement.colocate_all": True})).takes_turns
    monkeypatch.setattr(row_budget.torch.cuda, "device_count", lambda: 2)
    assert BudgetSettings.of(_unset()).of_samplers == 0, "vLLM has the second one"
