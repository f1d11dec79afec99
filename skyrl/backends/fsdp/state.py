"""Adapters on disk: training state that continues bit for bit, and the PEFT format that samplers load.

Only safetensors and JSON, nothing that executes. Deliberately knows nothing of atomic directories: whoever
names the directory publishes it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl.backends.base import InvalidRequest
from skyrl.backends.fsdp.adapter import Adapter

FORMAT = 1
STATE_JSON, STATE_TENSORS = "state.json", "state.safetensors"
PEFT_JSON, PEFT_TENSORS = "adapter_config.json", "adapter_model.safetensors"
_OPTIMIZER = ("exp_avg", "exp_avg_sq", "gradient")


def save_state(adapter: Adapter, directory: Path) -> None:
    """Write weights and, where there are any, moments and the pending gradient, as `<part>.<module>.lora_A` float32."""
    tensors: dict[str, Tensor] = {}
    for part in ("weights", *_OPTIMIZER):
        flat: Tensor | None = getattr(adapter, part)
        if flat is not None:
            tensors |= {f"{part}.{name}": view.cpu().contiguous() for name, view in adapter.views(flat).items()}
    save_file(tensors, directory / STATE_TENSORS)
    about = {"format": FORMAT, "step": adapter.step, "lora": asdict(adapter.spec), "targets": _names(adapter)}
    (directory / STATE_JSON).write_text(json.dumps(about, indent=1) + "\n")


def load_state(adapter: Adapter, directory: Path, *, optimizer: bool) -> None:
    """Replace weights; with `optimizer` also moments, step count and pending gradient, which are else dropped.

    Raises InvalidRequest when the saved adapter has another rank, alpha or other layers; OSError, ValueError
    or SafetensorError when files are missing or damaged. Nothing changes on an error.
    """
    about: dict[str, Any] = json.loads((directory / STATE_JSON).read_text())
    if about["format"] != FORMAT:
        raise ValueError(f"{directory / STATE_JSON}: format {about['format']}, this version reads {FORMAT}")
    for key in ("rank", "alpha"):
        saved, own = about["lora"][key], getattr(adapter.spec, key)
        if saved != own:
            raise InvalidRequest(f"lora_config.{key}: the saved adapter has {saved}, this model has {own}")
    if about["targets"] != _names(adapter):
        differing = sorted(set(about["targets"]) ^ set(_names(adapter)))
        raise InvalidRequest(
            "lora_config: the saved adapter trains other layers (train_attn, train_mlp or train_unembed "
            "differ): " + ", ".join(differing[:3])
        )
    stored = load_file(directory / STATE_TENSORS)
    parts: dict[str, Tensor | None] = {}
    for part in ("weights", *_OPTIMIZER):
        named = {n.removeprefix(f"{part}."): t for n, t in stored.items() if n.startswith(f"{part}.")}
        wanted = part == "weights" or (optimizer and bool(named))
        parts[part] = adapter.pack(named) if wanted else None
    for part, flat in parts.items():
        setattr(adapter, part, flat)
    adapter.step = int(about["step"]) if optimizer else 0


def save_adapter(adapter: Adapter, base_model: str, directory: Path) -> None:
    """Write the adapter as PEFT does: names `base_model.model.<module>.lora_A.weight`, float32."""
    tensors = {
        f"base_model.model.{name}.weight": view.detach().cpu().contiguous()
        for name, view in adapter.views(adapter.weights).items()
    }
    save_file(tensors, directory / PEFT_TENSORS, metadata={"format": "pt"})
    alpha = float(adapter.spec.alpha)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.spec.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in _names(adapter)}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (directory / PEFT_JSON).write_text(json.dumps(config, indent=2) + "\n")


def _names(adapter: Adapter) -> list[str]:
    return [target.name for target in adapter.targets]
