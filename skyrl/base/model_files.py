"""The files of a model on this machine, and what they say of it.

config.json and the files of its processor: its settings, and whether it is a mixture of experts, with what that means
for its adapters. Its chat template. tokenizer.json: which token ids two base models share. Imports no tokenizer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

TOOL_TEMPLATE = "tool_use"
"""The name of the template for conversations with tools, where a model has several."""


def json_of(base_model: str, name: str) -> dict[str, Any]:
    """The file `name` of a directory, or of a model of the hub that is on this machine. Empty if it cannot be read or
    holds no JSON object."""
    file = file_of(base_model, name)
    try:
        values = {} if file is None else json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def file_of(base_model: str, name: str) -> Path | None:
    """The path of the file `name` of a directory, which may be missing there, or of a model of the hub; None if that
    model's file is not on this machine."""
    if Path(base_model).is_dir():
        return Path(base_model) / name
    from huggingface_hub import try_to_load_from_cache  # takes 0.14 s, which most commands need not wait

    try:
        path = try_to_load_from_cache(base_model, name)
    except ValueError:  # no name of the hub
        return None
    return Path(path) if isinstance(path, str) else None


def template_of(base_model: str, *, tools: bool = True) -> str | None:
    """The text of the chat template; None if the model has none on this machine. Some models have several by name:
    vLLM takes that for tools for a chat that has `tools`, and the default one for all others."""
    named = _text_of(base_model, f"additional_chat_templates/{TOOL_TEMPLATE}.jinja") if tools else None
    text = named or _text_of(base_model, "chat_template.jinja")
    for name in ("tokenizer_config.json", "chat_template.json"):
        text = text or _template_in(json_of(base_model, name).get("chat_template"), tools)
    return text


def _text_of(base_model: str, name: str) -> str | None:
    file = file_of(base_model, name)
    try:
        return None if file is None else file.read_text()
    except OSError:
        return None


def _template_in(given: Any, tools: bool) -> str | None:
    """The template in a value of `chat_template`: a text, or a list of named ones."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        return None
    by_name = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
    return (by_name.get(TOOL_TEMPLATE) if tools else None) or by_name.get("default")


TrainMlpOfMixtures = Literal["train", "leave_out", "refuse"]

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names under which configurations count experts. Qwen3-MoE writes the second one, and means the first."""
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "dense_mlp_idx")
"""Names under which configurations count the first layers, which have no experts."""
_WITH_EXPERTS = ("sparse", "moe", "E")
"""What configurations that name the kind of each layer call one with experts."""

TRAIN_MLP_REFUSED = (
    "must be false: the base model is a mixture of experts, and this server does not train its experts; send "
    "train_mlp=False, or ask the operator for trainer.policy.model.lora.train_mlp_of_mixtures = train, which trains "
    "experts too, or leave_out, which trains the other layers"
)
FROZEN_WARNING = (
    "the base model is a mixture of experts: with train_mlp (the default) this server trains attention and "
    "unembedding, and leaves the experts as they are (metric experts_are_frozen:max)"
)
FROZEN_EXPERTS = "experts_are_frozen:max"
"""A metric, 1.0 in every pass of an adapter that asked for `train_mlp` and does not train the experts."""


def is_mixture(base_model: str) -> bool:
    """Whether the base model has experts. False if its config.json is not on this machine."""
    return experts_of(model_config(base_model)) > 0


def model_config(base_model: str) -> dict[str, Any]:
    """The text model's part of `whole_config`."""
    values = whole_config(base_model)
    return values.get("text_config") or values


def whole_config(base_model: str) -> dict[str, Any]:
    """The config.json of a directory, or of a model of the hub that is on this machine. Empty if it cannot be read."""
    return json_of(base_model, "config.json")


def experts_of(config: dict[str, Any]) -> int:
    """How many experts each layer has; 0 for a dense model. `config`: the text model's part of a config.json."""
    return max(config.get(name) or 0 for name in _COUNTS)


def layers_with_experts(config: dict[str, Any]) -> list[int]:
    """The numbers of a mixture's layers that have experts; the others have one MLP, or none. `config`: as `experts_of`,
    with num_hidden_layers."""
    for name in ("mlp_layer_types", "layers_block_type", "hybrid_override_pattern"):
        if found := [number for number, kind in enumerate(config.get(name) or ()) if kind in _WITH_EXPERTS]:
            return found
    first = next((count for name in _DENSE_FIRST if (count := config.get(name))), 0)
    dense = config.get("mlp_only_layers") or ()
    step = config.get("decoder_sparse_step") or 1
    numbers = range(first, config["num_hidden_layers"])
    return [number for number in numbers if number not in dense and (number + 1) % step == 0]


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    """Unigram models list their tokens in the order of the ids, each with a score; others name the id of each token."""

    vocab: dict[str, int] | list[tuple[str, float]]


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


@dataclass(frozen=True)
class Shared:
    """`same` of `ids`, all ids that one or both have, stand for the same token in both."""

    same: int
    ids: int


def shared_ids(one: str, other: str) -> Shared | None:
    """Compare two base models: directories, or names of the model hub. Reads files of several megabytes. None if one of
    them has no tokenizer.json on this machine, or one that lists no tokens."""
    tokens, others = tokens_of(one), tokens_of(other)
    if tokens is None or others is None:
        return None
    return Shared(len(tokens.items() & others.items()), len(tokens.keys() | others.keys()))


def tokens_of(base_model: str) -> dict[int, str] | None:
    """The token of each id, by a model's tokenizer.json; None as for `shared_ids`."""
    file = file_of(base_model, "tokenizer.json")
    try:
        found = None if file is None else msgspec.json.decode(file.read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.DecodeError):
        return None
    if found is None:
        return None
    vocab = found.model.vocab
    tokens = (
        {number: token for token, number in vocab.items()}
        if isinstance(vocab, dict)
        else {number: token for number, (token, _) in enumerate(vocab)}
    )
    return tokens | {added.id: added.content for added in found.added_tokens}
