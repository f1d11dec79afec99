"""What a backend sets before it computes on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skyrl.trainer.device import prepare_device

DETERMINISTIC: Any = torch.utils.deterministic


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """Puts torch's settings back."""
    cudnn, fill = torch.backends.cuda.cudnn_sdp_enabled(), DETERMINISTIC.fill_uninitialized_memory
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    DETERMINISTIC.fill_uninitialized_memory = fill
    torch.set_num_threads(threads)


def test_on_cuda_operations_are_deterministic_where_they_can_be_and_attention_needs_no_plan_for_a_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.backends.cuda.enable_cudnn_sdp(True)
    DETERMINISTIC.fill_uninitialized_memory = True
    assert prepare_device(1) == torch.device("cuda")
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not DETERMINISTIC.fill_uninitialized_memory, "NaN in each new tensor costs a kernel"
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


def test_a_cpu_gets_its_threads_and_no_other_setting() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert prepare_device(1) == torch.device("cpu")
    assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
