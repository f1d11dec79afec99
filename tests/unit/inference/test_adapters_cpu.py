"""Adapters that a vLLM on a CPU computes with where they lie, beside vLLM's own reader and slots."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA

    from skyrl.inference.vllm_plugin import adapters_cpu
    from skyrl.inference.vllm_plugin.adapters_cpu import opened, refer
    from skyrl.inference.vllm_plugin.punica import Groups, add_grouped
    from skyrl.inference.vllm_plugin.slots import Slots, check_sizes

SLOTS, MOST, HIDDEN, WIDTHS = 3, 8, 6, (5, 4)


def layer(dtype: torch.dtype = torch.float32) -> Any:
    """vLLM's own layer of two slices, with its slots."""
    made = object.__new__(MergedColumnParallelLinearWithLoRA)
    torch.nn.Module.__init__(made)
    made.__dict__.update(
        tp_size=1, n_slices=2, output_slices=WIDTHS, lora_config=SimpleNamespace(fully_sharded_loras=False)
    )
    made.lora_a_stacked = tuple(torch.zeros(SLOTS, 1, MOST, HIDDEN, dtype=dtype) for _ in WIDTHS)
    made.lora_b_stacked = tuple(torch.zeros(SLOTS, 1, width, MOST, dtype=dtype) for width in WIDTHS)
    return made


def adapter(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.randn(rank, HIDDEN) for _ in WIDTHS], [torch.randn(width, rank) for width in WIDTHS]


def update(made: Any, rows: Groups) -> torch.Tensor:
    torch.manual_seed(1)
    y, x = torch.zeros(4, sum(WIDTHS)), torch.randn(4, HIDDEN)
    add_grouped(y, x, rows, made.lora_a_stacked, made.lora_b_stacked, 1.0, WIDTHS)
    return y


def test_adapters_of_smaller_ranks_compute_as_in_slots_that_are_padded() -> None:
    plain, referring = layer(), layer()
    refer(referring)
    small, full = adapter(2), adapter(MOST)
    a, b = adapter(4)
    for made in (plain, referring):
        made.set_lora(0, *small)
        made.set_lora(1, *full)
        made.set_lora(2, *full)
        made.set_lora(2, [a[0], None], [b[0], None])  # the second slice stays as it is
    rows: Groups = [(0, slice(0, 1)), (1, slice(1, 2)), (2, slice(2, 4))]
    torch.testing.assert_close(update(referring, rows), update(plain, rows))
    assert not update(referring, rows)[2:, WIDTHS[0] :].any()
    stacked = referring.lora_a_stacked[0]
    assert stacked.of(0) is small[0][0], "no copy"
    assert stacked.shape == plain.lora_a_stacked[0].shape
    referring.reset_lora(1)
    assert not update(referring, rows)[1].any()


def test_a_matrix_is_kept_in_the_dtype_of_the_slots_and_must_fit_them() -> None:
    made = layer(torch.bfloat16)
    refer(made)
    a, b = adapter(2)
    made.set_lora(0, a, b)
    assert made.lora_a_stacked[0].of(0).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="does not fit"):
        made.set_lora(0, *adapter(MOST + 1))
    with pytest.raises(ValueError, match="does not fit"):
        Slots(torch.zeros(SLOTS, 1, MOST, HIDDEN)).put(0, torch.zeros(1, HIDDEN + 1))


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ((2, HIDDEN - 1), (WIDTHS[0], 2), "which has 6 inputs and 5 outputs"),
        ((2, HIDDEN), (WIDTHS[0] - 1, 2), "4 x 2 for gate"),
        ((2, HIDDEN), (WIDTHS[0], 3), "5 x 3 for gate"),
    ],
)
def test_matrices_that_the_layer_could_not_compute_with_are_refused_before_they_take_a_slot(
    a: tuple[int, int], b: tuple[int, int], says: str
) -> None:
    made = layer()
    good: dict[str, Any] = {"gate": part((2, HIDDEN), (WIDTHS[0], 2)), "up": part((2, HIDDEN), (WIDTHS[1], 2))}
    bad = good | {"gate": part(a, b)}
    check_sizes(made, ["gate", "up"], bad)  # vLLM's own slots pad them
    refer(made)
    check_sizes(made, ["gate", "up"], good)
    check_sizes(made, ["gate_up"], {"gate_up": part((2, HIDDEN), (sum(WIDTHS), 2))})
    check_sizes(made, ["gate", "up"], {})
    with pytest.raises(ValueError, match=says):
        check_sizes(made, ["gate", "up"], bad)


def part(a: tuple[int, int], b: tuple[int, int]) -> SimpleNamespace:
    return SimpleNamespace(lora_a=torch.zeros(a), lora_b=torch.zeros(b))


def test_layers_that_divide_the_rank_keep_vllms_slots() -> None:
    made = layer()
    made.lora_config.fully_sharded_loras = True
    refer(made)
    assert isinstance(made.lora_a_stacked[0], torch.Tensor)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_gives_what_safetensors_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, mapped: bool) -> None:
    monkeypatch.setattr(adapters_cpu, "SHARED_MEMORY", f"{tmp_path}/" if mapped else "/nowhere/")
    file = tmp_path / "adapter_model.safetensors"
    save_file({"b": torch.randn(3, 2), "a": torch.randn(2, 2).bfloat16(), "none": torch.zeros(0, 2)}, file)
    link = tmp_path / "link"
    link.symlink_to(file)
    with safe_open(file, framework="pt") as plain, opened(str(link), "pt") as own:
        names = sorted(own.keys())
        assert names == sorted(plain.keys())
        for name in names:
            assert own.get_tensor(name).dtype == plain.get_tensor(name).dtype
            assert torch.equal(own.get_tensor(name), plain.get_tensor(name))


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    save_file({"b": torch.ones(3, 2)}, file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(SafetensorError, match="cut off"), opened(str(file), "pt"):
        raise AssertionError


def test_a_mapped_tensor_outlives_its_file_and_can_be_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM scales B."""
    monkeypatch.setattr(adapters_cpu, "SHARED_MEMORY", f"{tmp_path}/")
    file = tmp_path / "adapter_model.safetensors"
    save_file({"b": torch.ones(3, 2)}, file)
    with opened(str(file), "pt") as own:
        mapped = own.get_tensor("b").mul_(2)
    with safe_open(file, framework="pt") as plain:
        assert plain.get_tensor("b").sum() == 6
    file.unlink()
    assert mapped.sum() == 12


def test_a_file_is_read_where_the_tmpfs_has_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped file would take it as long as vLLM keeps the adapter."""
    monkeypatch.setattr(adapters_cpu, "SHARED_MEMORY", f"{tmp_path}/")
    monkeypatch.setattr(adapters_cpu, "ROOM", 2**60)
    file = tmp_path / "adapter_model.safetensors"
    save_file({"b": torch.ones(3, 2)}, file)
    with opened(str(file), "pt") as own:
        tensor = own.get_tensor("b")
    with file.open("r+b") as changed:
        changed.seek(-24, 2)
        changed.write(bytes(24))
    assert tensor.sum() == 6, "it is a copy"
