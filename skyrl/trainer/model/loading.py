"""Loads a base model's weights into the dtype of training, and refuses files that do not hold the model of config.json.

The names and shapes of all tensors are compared before the first weight is read. Of a model that sees, transformers'
class is that of the whole model, and what is for pictures is detached: the names of modules stay those of the whole
model, because PEFT and vLLM know adapters by them. Knows transformers' loading. Knows nothing of packed rows, adapters
or passes.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.utils import logging

from skyrl.base.config.server import ConfigError
from skyrl.base.pictures.vision import SEES
from skyrl.trainer.experts.routing import CORRECTIONS
from skyrl.trainer.files.config import LOADING_ERRORS, ModelConfig, cannot_load, one_line, read_config
from skyrl.trainer.files.tensor_files import StoredWeights, weight_files

SEEING = frozenset(
    {
        *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "kimi_k25", "nemotron_h_omni"),
        *("gemma4", "glm5_next", "inkling_mm_model", "mistral3"),
    }
)
"""Model types with a vision tower whose class computes text alone as its text model does."""
_LISTED_AS_SEEING = SEEING | {"mistral4"}
"""transformers has the class of Mistral 4's text part there alone."""


def model_class(config: Any) -> Any:
    """transformers' class that loads models of this configuration."""
    return AutoModelForImageTextToText if config.model_type in _LISTED_AS_SEEING else AutoModelForCausalLM


TOWER = "visual"
"""The module that computes pictures, beside the language model, in models of the types that see (`SEES`)."""


def detach_vision(model: Any) -> Any:
    """Take off what computes pictures, so that the rest is the language model and its output layer. Returns the vision
    tower with its projector, or None if the model has none that this trainer runs."""
    if model.config.model_type not in SEEING:
        return None
    inner: nn.Module = getattr(model, "model", model)
    tower = None
    if model.config.model_type in SEES:
        tower = getattr(inner, TOWER)
        # The tower keeps its own: transformers writes the language model's attention into all that a model has
        model.config.vision_config = copy.deepcopy(model.config.vision_config)
    for name, _ in list(inner.named_children()):
        if name not in ("language_model", "lm_head"):
            delattr(inner, name)
    if inner is model:  # the output layer is in the language model, where transformers does not look for it
        text = model.language_model
        model.get_decoder, model.get_output_embeddings = text.get_decoder, text.get_output_embeddings
    return tower


@contextmanager
def attached(model: Any, tower: nn.Module) -> Iterator[None]:
    """Inside, the model has its vision tower again, and computes pictures as transformers does."""
    setattr(model.model, TOWER, tower)
    try:
        yield
    finally:
        delattr(model.model, TOWER)


_FURTHER_TOKENS = re.compile(r"(.*\.layers\.\d+\.)eh_proj\.weight$")
"""DeepSeek's and GLM's files have such layers behind the model's."""
_ONE_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"
"""A variable of transformers. Without it four threads read ahead of the thread that joins experts: the whole model may
then be in memory twice."""


def load_model(
    path: str,
    dtype: torch.dtype,
    *,
    safetensors_only: bool = False,
    keep_quantized: bool = False,
) -> Any:
    """transformers' language model of config.json in main memory, with weights of `dtype` (some layers ask for
    float32).

    Weights that are quantized in the files are computed as they are read; nothing of the model or its configuration
    says that they were. With `keep_quantized` they become `QuantizedWeight`s instead. Takes the memory of the model,
    and of the largest layer's experts or tensor.

    Raises ConfigError: files are missing or damaged, or config.json and the files do not belong together; or nothing
    is quantized that `keep_quantized` could keep."""
    described = read_config(path)
    if keep_quantized:
        check_quantized(path, described)
    chosen = class_of(path, described.config)
    files = weight_files(path)
    if not files:
        return _load_pickled(path, described, chosen, dtype, safetensors_only=safetensors_only)
    with StoredWeights(path, files, described.format, dtype, keep_quantized=keep_quantized) as stored:
        tied = check_weights(path, described.config, chosen, stored)
        weights = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        try:
            with _one_at_a_time():
                model, _ = _load(chosen, described.config, weights, dtype)
        except (*LOADING_ERRORS, RuntimeError) as error:
            raise cannot_load(path, one_line(error)) from error
    _check_tied(path, tied, model.all_tied_weights_keys)
    model.config.name_or_path = path
    return model


def check_quantized(path: str, described: ModelConfig) -> None:
    """Raise ConfigError for a model of which nothing is quantized that `trainer.keep_quantized` could keep."""
    if described.format is None:
        raise ConfigError(
            f"trainer.keep_quantized: {path} is not quantized: write a quantized release of it with skyrl quantize, "
            "and give that as base_model"
        )


def class_of(path: str, config: Any) -> Any:
    """transformers' class of the language model, or of the model with a language model that sees. Raises ConfigError
    if it has none."""
    seeing = config.model_type in _LISTED_AS_SEEING
    try:
        return (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if seeing else MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    except KeyError:
        raise cannot_load(
            path, f"config.json's model_type is {config.model_type!r}, and transformers has no language model of it"
        ) from None


def check_weights(path: str, config: Any, model_class: Any, stored: StoredWeights) -> dict[str, str]:
    """Compare names and shapes of the stored tensors with the model's, and those that the model ties with each other.
    Reads no other weights. Returns the model's tied parameters.

    Raises ConfigError for tensors that are missing, without a place in the model, or of another shape."""
    shapes = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        with _silence():
            model, info = _load(model_class, config, empty, torch.float32, device_map={"": "meta"})
    except (*LOADING_ERRORS, RuntimeError) as error:
        raise cannot_load(path, one_line(error)) from None
    _check_found(path, config, info)
    tied: dict[str, str] = dict(model.all_tied_weights_keys)
    _check_tied(path, tied, {one: other for one, other in tied.items() if _same(stored, shapes, one, other)})
    return tied


def _load(model_class: Any, config: Any, weights: Any, dtype: torch.dtype, **options: Any) -> Any:
    model_class._keep_in_fp32_modules_strict = {*(model_class._keep_in_fp32_modules_strict or ()), *CORRECTIONS}
    return model_class.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        attn_implementation="eager",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # `_check_found` refuses them with a sentence
        **options,
    )


def _check_found(path: str, config: Any, info: Any) -> None:
    """Raise ConfigError for what transformers only warns of."""
    if missing := sorted(info["missing_keys"]):
        heads = [name for name in missing if name.startswith("lm_head.")]
        if heads and not config.get_text_config().tie_word_embeddings:
            raise cannot_load(path, f"config.json's tie_word_embeddings is false, and the files lack {heads[0]}")
        raise cannot_load(path, f"the files lack {_some(missing)}, which the model of config.json has")
    if wrong := sorted(info["mismatched_keys"]):
        name, found, expected = wrong[0]
        raise cannot_load(
            path, f"the files hold {name} with shape {list(found)}, and config.json makes it {list(expected)}"
        )
    if others := _without_further_tokens(sorted(info["unexpected_keys"])):
        raise cannot_load(path, f"the files hold {_some(others)}, which the model of config.json does not have")


def _without_further_tokens(names: list[str]) -> list[str]:
    """Without layers that predict the tokens after the next one: neither training nor the model's logits use them."""
    layers = tuple(found[1] for name in names if (found := _FURTHER_TOKENS.match(name)))
    return [name for name in names if not name.startswith(("mtp.", *layers))]


def _check_tied(path: str, tied: dict[str, str], equal: dict[str, str]) -> None:
    if different := sorted(tied.keys() - equal.keys()):
        raise cannot_load(
            path,
            f"config.json's tie_word_embeddings is true, and the files hold another tensor as {different[0]} than as "
            f"{tied[different[0]]}",
        )


def _same(stored: StoredWeights, shapes: dict[str, list[int]], one: str, other: str) -> bool:
    """Whether the files hold equal tensors under both names, or one of them alone."""
    if one not in shapes or other not in shapes:
        return True
    if shapes[one] != shapes[other]:
        return False
    first, second, rows, step = stored.get_slice(one), stored.get_slice(other), shapes[one][0], 1024
    parts = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    return all(torch.equal(first[part], second[part]) for part in parts)


def _load_pickled(
    path: str, described: ModelConfig, model_class: Any, dtype: torch.dtype, *, safetensors_only: bool
) -> Any:
    """A model without safetensors files. Raises ConfigError for quantized weights."""
    if described.format is not None:
        raise cannot_load(path, "config.json has quantization_config, which the trainer reads with safetensors files")
    try:
        model, info = model_class.from_pretrained(
            path,
            config=described.config,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            use_safetensors=True if safetensors_only else None,
            ignore_mismatched_sizes=True,
        )
    except LOADING_ERRORS as error:
        raise cannot_load(path, one_line(error)) from error
    except RuntimeError as error:
        raise cannot_load(path, one_line(error)) from None
    _check_found(path, described.config, info)
    return model


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} others"


@contextmanager
def _silence() -> Iterator[None]:
    """Without transformers' report, which says that missing weights have got random numbers."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    before = os.environ.get(_ONE_AT_A_TIME)
    os.environ[_ONE_AT_A_TIME] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ONE_AT_A_TIME]
        else:
            os.environ[_ONE_AT_A_TIME] = before
