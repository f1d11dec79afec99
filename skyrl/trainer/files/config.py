"""A base model's config.json: reads it, and says in one sentence which field is missing, unknown or of another model.

Knows transformers' configurations. Knows nothing of weights, layers or passes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN
from transformers.utils.hub import cached_file

from skyrl.base.config.server import ConfigError
from skyrl.trainer.quantized.format import Format, format_of

LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError, SafetensorError)
"""What transformers and safetensors raise for a model that is missing, damaged or unknown."""
_CONFIG_ERRORS = (*LOADING_ERRORS, StrictDataclassError, TypeError, AttributeError)

_NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "hidden_act",
    "rms_norm_eps",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
"""Fields that released models state. transformers takes a default where one is missing, which is another model's."""
_ALSO = {"intermediate_size": "block_ff_dim"}
"""Other names of fields in older releases, which transformers reads, too: LFM2's."""
_ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
_ROUTERS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_router_activation_func": "sigmoid"}
"""Fields that transformers does not read, because its layers have this router alone."""
_SIGMOID_ROUTERS = (
    *("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm_moe_dsa"),
    *("minimax_m2", "kimi_linear"),
)
SAME_CLASS = {"kimi_k2": "deepseek_v3"}
"""Kinds of models without a class of their own in transformers."""

NEWER = dict.fromkeys(
    (
        *("bailing_hybrid", "hy_v4_vl", "inkling2", "inkling2_loop", "internlm3", "iquestcoder"),
        *("lfm3", "lfm3_vl", "mistral_large4", "sarvam_mla", "sarvam_moe"),
    ),
    "5.24",
)
"""Kinds of language models that a later release of transformers knows, and the release."""


@dataclass(frozen=True)
class ModelConfig:
    """`config`: transformers' configuration, in which nothing says that the weights are quantized. `format`: how the
    files store quantized weights, or None."""

    config: Any
    format: Format | None


def cannot_load(path: str, why: str) -> ConfigError:
    return ConfigError(f"base_model: cannot load {path}: {why}")


def one_line(error: BaseException) -> str:
    """The error's text without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def read_config(path: str) -> ModelConfig:
    """Read config.json of a directory, or of a model of the hub.

    Raises ConfigError: the file is missing or damaged, lacks a field, or has a value that is not known."""
    described = _read(path)
    kind = described.get("model_type")
    if not isinstance(kind, str):
        raise cannot_load(path, "config.json lacks model_type")
    if (known := SAME_CLASS.get(kind, kind)) not in CONFIG_MAPPING:
        version = transformers.__version__
        newer = f", and transformers {NEWER[kind]} does" if kind in NEWER else ""
        raise cannot_load(
            path, f"config.json's model_type is {kind!r}, which transformers {version} does not know{newer}"
        )
    nested = described.get("text_config")
    if nested is None:
        _check_needed(path, described, CONFIG_MAPPING[known])
    try:
        decoded, _ = CONFIG_MAPPING[known].get_config_dict(path)  # infinity has a form of its own in the file
        config = CONFIG_MAPPING[known].from_dict(decoded | {"model_type": known})
        text = config.get_text_config()
    except _CONFIG_ERRORS as error:
        raise cannot_load(path, f"config.json describes no {kind} model: {one_line(error)}") from None
    _check_known(path, nested if isinstance(nested, Mapping) else described, text)
    found = _quantization(path, described, text.model_type)
    for each in (config, text):
        for field in ("quantization_config", "compression_config"):
            if hasattr(each, field):
                delattr(each, field)
    config.name_or_path = path
    return ModelConfig(config, found)


def _read(path: str) -> dict[str, Any]:
    try:
        file = cached_file(path, "config.json")
        text = Path(str(file)).read_text()
    except LOADING_ERRORS as error:
        raise cannot_load(path, one_line(error)) from error
    try:
        described = json.loads(text, object_hook=_special_float)
    except ValueError as error:
        raise cannot_load(path, f"config.json is no JSON: {one_line(error)}") from None
    if not isinstance(described, dict):
        raise cannot_load(path, "config.json is no JSON object")
    return described


def _special_float(found: dict[str, Any]) -> Any:
    """transformers writes infinity and NaN as an object with one field."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def _check_needed(path: str, described: Mapping[str, Any], kind: Any) -> None:
    """`kind`: transformers' class of the configuration. A configuration inside of a larger one is not checked: its file
    states what differs from the class."""
    default, aliases = kind(), kind.attribute_map
    for field in _NEEDED:
        if isinstance(getattr(kind, field, None), property):  # computed from other fields
            continue
        names = {field, aliases.get(field), _ALSO.get(field)} | {name for name, of in aliases.items() if of == field}
        if getattr(default, field, None) is not None and not names & described.keys():
            raise cannot_load(path, f"config.json lacks {aliases.get(field, field)}")


def _check_known(path: str, described: Mapping[str, Any], config: Any) -> None:
    """`described`: the text model's fields, as the file has them."""
    for field in _ACTIVATIONS:
        name = getattr(config, field, None)
        if isinstance(name, str) and name not in ACT2FN:
            raise cannot_load(path, f"config.json's {field} is {name!r}, which is no activation of transformers")
    if described.get("model_type") in _SIGMOID_ROUTERS:
        for field, known in _ROUTERS.items():
            if (stated := described.get(field, known)) != known:
                raise cannot_load(path, f"config.json's {field} is {stated!r}, and the router is known with {known!r}")


def _quantization(path: str, described: Mapping[str, Any], model_type: str) -> Format | None:
    nested = described.get("text_config") or {}
    for place, values in (("", described), ("text_config.", nested)):
        if values.get("compression_config"):
            raise cannot_load(path, f"config.json has {place}compression_config, a form that the trainer does not read")
        if found := values.get("quantization_config"):
            try:
                return format_of(found, model_type)
            except ValueError as error:
                raise cannot_load(path, f"config.json's {place}quantization_config.{error}") from None
    return None
