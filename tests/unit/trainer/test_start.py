"""How a backend is chosen and begins: the base model, its context, the device, and starts that fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_lora_support import CONTEXT, VOCAB, base_path
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.engine.main import _load_backend
from skyrl.runtime.processes.startup import NotLoaded
from skyrl.trainer import create_backend, device
from skyrl.trainer.device import prepare_device

DETERMINISTIC: Any = torch.utils.deterministic


def test_the_known_backend_is_built_and_others_are_refused() -> None:
    """The context is the smaller of the model's and the configured length."""
    for max_model_len, context in ((64, 64), (10_000, CONTEXT), (None, CONTEXT)):
        settings = {"generator.inference_engine.max_model_len": max_model_len}
        config = load_config({"base_model": base_path(), "backend_config": settings})
        backend = create_backend(config)
        assert (backend.limits.vocab_size, backend.limits.max_context) == (VOCAB, context)
        backend.close()
    for name in ("megatron", "none"):
        with pytest.raises(ConfigError, match=f"no training backend '{name}'; there are: fsdp"):
            create_backend(config.model_copy(update={"backend": name}))


def test_base_models_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    small = {"vocab_size": 31, "bos_token_id": None, "eos_token_id": None}
    fused = AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2, n_positions=32, **small)
    path = tmp_path / "gpt2"
    AutoModelForCausalLM.from_config(fused).save_pretrained(path)
    with pytest.raises(ConfigError, match="no linear layers of a known name"):
        create_backend(load_config({"base_model": str(path)}))
    with pytest.raises(ConfigError, match="base_model: cannot load"):
        create_backend(load_config({"base_model": str(tmp_path)}))


def test_missing_model_files_allow_another_start_and_a_bad_config_does_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(base_path()) / "config.json").read_bytes())
    with pytest.raises(NotLoaded, match=f"^base_model: cannot load {tmp_path}: .*no file named model.safetensors"):
        _load_backend(load_config({"base_model": str(tmp_path)}))
    (tmp_path / "config.json").write_text('{"model_type": "of no kind"}')
    with pytest.raises(ConfigError, match=f"^base_model: cannot load {tmp_path}: .*of no kind"):
        _load_backend(load_config({"base_model": str(tmp_path)}))


def test_a_device_that_breaks_while_the_model_is_loaded_allows_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(where: torch.device) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(device, "synchronize", broken)
    with pytest.raises(NotLoaded, match="DeviceFault: cpu cannot be used any more: CUDA error"):
        _load_backend(load_config({"base_model": base_path()}))


@pytest.fixture
def settings_of_torch() -> Iterator[None]:
    """Puts torch's settings back."""
    cudnn, fill = torch.backends.cuda.cudnn_sdp_enabled(), DETERMINISTIC.fill_uninitialized_memory
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    DETERMINISTIC.fill_uninitialized_memory = fill
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("settings_of_torch")
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


@pytest.mark.usefixtures("settings_of_torch")
def test_a_cpu_gets_its_threads_and_no_other_setting() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert prepare_device(1) == torch.device("cpu")
    assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
