"""Adapters on disk: a PEFT adapter that samplers and other programs load, and the optimizer state next to it.

Writes only safetensors and JSON, which hold no code. The caller makes the directory and moves it to its place.
`skyrl.base.adapter_files` has the names and shapes of the tensors, and the check of files from elsewhere. A value head
has a file of its own beside the optimizer's: neither PEFT nor vLLM knows one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl.base.adapter_files import (
    FUSED_NAMES,
    PEFT_JSON,
    PEFT_PREFIX,
    PEFT_SUFFIX,
    PEFT_TENSORS,
    TRAIN_FLAGS,
    DoesNotFit,
    Target,
    check_adapter,
    fused_experts,
)
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.files.tensor_files import write_file
from skyrl.trainer.lora.adapter import VALUE_HEAD, Adapter, with_value_head, without_value_head
from skyrl.trainer.lora.rank_pattern import ranks_of, written_pattern
from skyrl.trainer.protocol import InvalidRequest

FORMAT = 2
STATE_JSON, OPTIMIZER_TENSORS = "state.json", "optimizer.safetensors"
FORMAT_1_TENSORS = "state.safetensors"
"""Weights and optimizer in one file, as `weights.<module>.lora_A`: still read, no longer written."""
OPTIMIZER_PARTS = ("exp_avg", "exp_avg_sq", "gradient")
VALUE_HEAD_TENSORS = "value_head.safetensors"
"""`value_head.weight` [1, hidden] and `value_head.bias` [1], float32."""
_LANGUAGE_MODEL = "language_model."
"""In the names of all layers of a model that sees, but for an output layer beside it."""
_OF_TOWERS = r"(?!.*(language_model|lm_head)).*"
"""The names of modules beside the language model. PEFT knows no adapters on some of them (Gemma 4's)."""


def save_state(adapter: Adapter, base_model: str, directory: Path) -> None:
    """Write the adapter in PEFT format, its value head if it has one, and the moments and the pending gradient if the
    adapter has them: float32 tensors named `<part>.<module>.lora_A`."""
    save_adapter(adapter, base_model, directory)
    if adapter.has_value_head:
        head = {name: view.cpu() for name, view in adapter.views(adapter.weights).items() if is_of_head(name)}
        save_file(head, directory / VALUE_HEAD_TENSORS)
    tensors: dict[str, Tensor] = {}
    parts = []
    for part in OPTIMIZER_PARTS:
        flat: Tensor | None = getattr(adapter, part)
        if flat is not None:
            parts.append(part)
            tensors |= {f"{part}.{name}": view.cpu().contiguous() for name, view in adapter.views(flat).items()}
    if tensors:
        save_file(tensors, directory / OPTIMIZER_TENSORS)
    lora = asdict(adapter.spec)
    for name in ("rank_pattern", "value_head"):  # earlier versions wrote neither
        if not lora[name]:
            del lora[name]
    description = {
        "format": FORMAT,
        "step": adapter.step,
        "parts": parts,
        "lora": lora,
        "targets": _names(adapter),
    }
    (directory / STATE_JSON).write_text(json.dumps(description, indent=1) + "\n")


def load_state(adapter: Adapter, directory: Path, trainable: Sequence[Target], *, optimizer: bool) -> Adapter:
    """The saved adapter, on the device of `adapter`, which stays as it is: weights, and with `optimizer` also moments,
    step count and pending gradient. Without `optimizer`, one with a value head may begin with an adapter that has none:
    its head is zero.

    Files without a training state are an adapter from elsewhere, or an export: they must fit exactly. Any other adapter
    trains the layers that it was saved with. Under equal train flags these may be others than those of `adapter`: in a
    mixture of experts the server's setting decides. `trainable`: the layers that adapters of this base model can train.

    Raises InvalidRequest when the saved adapter has other ranks or another alpha, other train flags, layers that are
    not trainable, or a value head that one of both has and the other has not; OSError, ValueError or SafetensorError
    when files are missing or damaged.
    """
    if not optimizer and not (directory / STATE_JSON).exists() and (directory / PEFT_JSON).exists():
        return _from_elsewhere(adapter, directory)
    description: dict[str, Any] = json.loads((directory / STATE_JSON).read_text())
    if "lora" not in description:
        raise InvalidRequest("path: the checkpoint holds a whole model, and this model is a LoRA adapter")
    if description["format"] not in (1, FORMAT):
        raise ValueError(f"{directory / STATE_JSON}: format {description['format']}, this version reads 1 and {FORMAT}")
    for key in ("rank", "alpha"):
        saved, own = description["lora"][key], getattr(adapter.spec, key)
        if saved != own:
            raise InvalidRequest(f"lora_config.{key}: the saved adapter has {saved}, this model has {own}")
    has_head = bool(description["lora"].get("value_head"))
    _check_value_head(adapter, has_head, optimizer=optimizer)
    layers = _saved_layers(adapter, description, trainable)
    _check_ranks(adapter.spec, description, layers)
    if adapter.has_value_head:
        (head,) = (target for target in adapter.targets if target.name == VALUE_HEAD)
        layers = with_value_head(layers, head.in_features)
    adapter = Adapter(adapter.spec, layers, adapter.device, drawn=False)
    if description["format"] == 1:
        stored = load_file(directory / FORMAT_1_TENSORS)
        weights = _part(stored, "weights")
        parts = [part for part in OPTIMIZER_PARTS if _part(stored, part)]
    else:
        weights = _weights_in(adapter, directory)
        parts = description["parts"]
        stored = load_file(directory / OPTIMIZER_TENSORS) if optimizer and parts else {}
    weights |= load_file(directory / VALUE_HEAD_TENSORS) if has_head else _new_head(adapter)
    packed = adapter.pack(weights)
    loaded = {part: adapter.pack(_part(stored, part)) for part in parts} if optimizer else {}
    step = int(description["step"]) if optimizer else 0
    adapter.replace([packed, *(loaded.get(part) for part in OPTIMIZER_PARTS)], step)
    return adapter


def _check_value_head(adapter: Adapter, saved: bool, *, optimizer: bool) -> None:
    if saved and not adapter.has_value_head:
        raise InvalidRequest(
            "path: the saved adapter has a value head, and this model has none; create it with "
            'user_metadata={"value_head": "true"}'
        )
    if adapter.has_value_head and not saved and optimizer:
        raise InvalidRequest(
            "optimizer: must be false: this model has a value head, and the saved adapter and its optimizer have none"
        )


def _from_elsewhere(adapter: Adapter, directory: Path) -> Adapter:
    if adapter.own_scales:
        raise InvalidRequest(
            "path: the files have no training state, and so one rank for all layers; this model has others in some "
            "(lora_config.rank_pattern)"
        )
    try:
        described = check_adapter(directory, without_value_head(adapter.targets), adapter.spec.rank)
    except DoesNotFit as error:
        raise InvalidRequest(f"path: {error}") from error
    if described.alpha != adapter.spec.alpha:
        raise InvalidRequest(f"path: the adapter has alpha {described.alpha}, this model has {adapter.spec.alpha}")
    loaded = Adapter(adapter.spec, adapter.targets, adapter.device, drawn=False)
    loaded.replace([loaded.pack(_weights_in(loaded, directory) | _new_head(loaded)), None, None, None], 0)
    return loaded


def _new_head(adapter: Adapter) -> dict[str, Tensor]:
    """The matrices of a value head at first, if the adapter has one."""
    return {name: torch.zeros(shape) for name, shape in adapter.shapes.items() if is_of_head(name)}


def _weights_in(adapter: Adapter, directory: Path) -> dict[str, Tensor]:
    """The matrices of an adapter's file, by their names in the adapter."""
    stored = load_file(directory / PEFT_TENSORS)
    named = {name.removeprefix(PEFT_PREFIX).removesuffix(PEFT_SUFFIX): each for name, each in stored.items()}
    return _with_joined_experts(adapter, named)


def _saved_layers(adapter: Adapter, description: dict[str, Any], trainable: Sequence[Target]) -> Sequence[Target]:
    saved = description["targets"]
    if saved == _names(adapter):
        return without_value_head(adapter.targets)
    if any(description["lora"][flag] != getattr(adapter.spec, flag) for flag in TRAIN_FLAGS):
        differing = sorted(set(saved) ^ set(_names(adapter)))
        raise InvalidRequest(
            "lora_config: the saved adapter trains other layers (train_attn, train_mlp or train_unembed "
            "differ): " + ", ".join(differing[:3])
        )
    layers = [target for target in trainable if target.name in saved]
    if len(layers) < len(saved):
        lacking = sorted(set(saved) - {target.name for target in layers})
        raise InvalidRequest(
            "path: the saved adapter trains layers of the base model that this server cannot train: "
            + ", ".join(lacking[:3])
        )
    return layers


def _check_ranks(own: LoraSpec, description: dict[str, Any], layers: Sequence[Target]) -> None:
    """Raise InvalidRequest, naming a layer, where the saved adapter has another rank than one of the spec `own`."""
    saved = tuple((expression, rank) for expression, rank in description["lora"].get("rank_pattern", ()))
    names = [target.name for target in layers]
    ranks = zip(ranks_of(own.rank, saved, names), ranks_of(own.rank, own.rank_pattern, names), strict=True)
    for name, (has, wants) in zip(names, ranks, strict=True):
        if has != wants:
            raise InvalidRequest(
                f"lora_config.rank_pattern: the saved adapter has rank {has} in {name}, this model has {wants}; the "
                f"checkpoint's pattern is {json.dumps(dict(saved))}"
            )


def save_adapter(adapter: Adapter, base_model: str, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the adapter in PEFT format: tensors `base_model.model.<module>.lora_A.weight`, rounded to the nearest
    `dtype`. Of experts, as the module says. Without a value head."""
    fused = fused_experts(adapter.targets)
    tensors = {
        f"{PEFT_PREFIX}{of_file}{PEFT_SUFFIX}": matrix.detach().to("cpu", dtype).contiguous()
        for name, view in adapter.views(adapter.weights).items()
        if not is_of_head(name)
        for of_file, matrix in ({name: view} if view.ndim == 2 else split(name, view, fused)).items()
    }
    write_file(directory / PEFT_TENSORS, tensors, {"format": "pt"})
    alpha = float(adapter.spec.alpha)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.spec.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        **_peft_targets(adapter, fused),
        **_peft_ranks(adapter, fused),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (directory / PEFT_JSON).write_text(json.dumps(config, indent=2) + "\n")


def _peft_targets(adapter: Adapter, fused: frozenset[str]) -> dict[str, list[str] | str]:
    """By the last part of a module's name; of fused experts, by the last parts of their parameters' names. Modules of
    what sees and hears, which may have the same names, are left out."""
    named = [name.rpartition(".") for name in _names(adapter)]
    modules = {leaf for module, _, leaf in named if module not in fused}
    parameters = {".".join([*module.rsplit(".", 2)[-2:], leaf]) for module, _, leaf in named if module in fused}
    # gate_up_proj comes first: PEFT then names its pair `base_layer`
    more: dict[str, list[str] | str] = {"target_parameters": sorted(parameters, reverse=True)} if parameters else {}
    if any(_LANGUAGE_MODEL in target.name for target in adapter.targets):
        more["exclude_modules"] = _OF_TOWERS
    return {"target_modules": sorted(modules), **more}


def _peft_ranks(adapter: Adapter, fused: frozenset[str]) -> dict[str, dict[str, int]]:
    """The ranks of layers that have another one than the adapter. PEFT and vLLM scale each layer by its own rank."""
    if not adapter.spec.rank_pattern:
        return {}
    ranks: dict[str, int] = {}
    for target in without_value_head(adapter.targets):
        module, _, leaf = target.name.rpartition(".")
        numbered = target.experts is not None and module not in fused
        expression = rf"{re.escape(module)}\.\d+\.{leaf}" if numbered else re.escape(target.name)
        ranks[expression] = adapter.shapes[f"{target.name}.lora_B"][-1]
    return {"rank_pattern": written_pattern(adapter.spec.rank, ranks)}


def _with_joined_experts(adapter: Adapter, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a PEFT file, with one for all experts where the adapter has one. They stay as they are where an
    expert's is lacking or has another shape."""
    fused = fused_experts(adapter.targets)
    for name, shape in adapter.shapes.items():
        if len(shape) == 3 and (joined := join(name, shape, stored, fused)) is not None:
            stored[name] = joined
    return stored


def _part(stored: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}."): tensor for name, tensor in stored.items() if name.startswith(f"{part}.")}


def is_of_head(name: str) -> bool:
    """Whether one of an adapter's matrices, by name, is the value head's."""
    return name.startswith(f"{VALUE_HEAD}.")


def _names(adapter: Adapter) -> list[str]:
    """Of the layers of the base model that the adapter changes."""
    return [target.name for target in without_value_head(adapter.targets)]


def split(name: str, matrices: Tensor, fused: frozenset[str]) -> dict[str, Tensor]:
    """What a file holds for all experts' matrices. name: `<experts>.<projection>.lora_A`; matrices: [experts, rank,
    inputs], or for lora_B [experts, outputs, rank]. `fused`: see `fused_experts`."""
    experts, projection, which = name.rsplit(".", 2)
    if experts not in fused:
        return {f"{experts}.{number}.{projection}.{which}": matrix for number, matrix in enumerate(matrices)}
    joined = matrices.flatten(0, 1) if which == "lora_A" else matrices.permute(1, 2, 0).flatten(1)
    return {f"{experts}{FUSED_NAMES[projection]}.{which}": joined}


def join(name: str, shape: tuple[int, ...], stored: dict[str, Tensor], fused: frozenset[str]) -> Tensor | None:
    """All experts' matrices, of the shape that `split` takes, from the tensors of a file, which this function takes out
    of `stored`. None, and nothing is taken, if one is lacking or has another shape."""
    with torch.device("meta"):
        expected = split(name, torch.empty(shape), fused)
    if any(each not in stored or stored[each].shape != like.shape for each, like in expected.items()):
        return None
    found = [stored.pop(each) for each in expected]
    if name.rsplit(".", 2)[0] not in fused:
        return torch.stack(found)
    experts, first, second = shape
    if name.endswith("lora_A"):
        return found[0].reshape(shape)
    return found[0].reshape(first, second, experts).permute(2, 0, 1)
