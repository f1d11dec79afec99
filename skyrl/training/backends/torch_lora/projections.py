"""Which linear layers of a base model adapters can train: their names, and how they are found and wrapped.

Knows transformers' names of projections. Knows nothing of adapters' weights or of how a wrapped layer computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from skyrl.base.types.lora import LoraSpec
from skyrl.training.backends.torch_lora.adapter import Target
from skyrl.training.backends.torch_lora.lora import ActiveSegments, MultiLoraLinear
from skyrl.training.backends.torch_lora.lora_experts import MultiLoraExperts

FORMS = (
    (("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")),
    (("qkv_proj", "o_proj"), ("gate_up_proj", "down_proj")),  # Phi-3
    (("q_proj", "k_proj", "v_proj", "dense"), ("fc1", "fc2")),  # Phi
)
"""The projections of a decoder layer's attention and of its MLP. A layer has those of one form, each once. A fused
projection is one layer with one pair of matrices, as PEFT and vLLM have it. vLLM must load adapters on all of a form:
GLM-4, with the attention of the first and the MLP of the second form, is none, because vLLM wants its MLP in parts."""

UNEMBED = ("lm_head",)
ATTENTION = tuple(dict.fromkeys(leaf for attention, _ in FORMS for leaf in attention))
MLP = tuple(dict.fromkeys(leaf for _, mlp in FORMS for leaf in mlp))
_LAYER = re.compile(r"^(.*\blayers\.\d+)\.")


def wrap_linears(model: nn.Module, active: ActiveSegments, *, mlp: bool = True) -> dict[str, MultiLoraLinear]:
    """Replace every linear layer that adapters can train by a MultiLoraLinear. Returns the new layers in module order.
    Without `mlp` the MLPs of all layers stay as they are.

    Raises ValueError unless each decoder layer has the projections of one of `FORMS` (without `mlp`, or where the layer
    has experts, of its attention), and the model has one lm_head: otherwise other projections would silently stay
    untrained.
    """
    known = ATTENTION + UNEMBED + (MLP if mlp else ())
    found: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and _leaf(name) in known:
            found[name] = module
    _check_complete(model, list(found), mlp=mlp)
    wrapped: dict[str, MultiLoraLinear] = {}
    for name, linear in found.items():
        parent, _, leaf = name.rpartition(".")
        wrapped[name] = MultiLoraLinear(name, linear, active)
        setattr(model.get_submodule(parent), leaf, wrapped[name])
    return wrapped


def _check_complete(model: nn.Module, names: Sequence[str], *, mlp: bool) -> None:
    dense = [sorted(attention + of_mlp) for attention, of_mlp in FORMS]
    attention_alone = [sorted(attention) for attention, _ in FORMS]
    with_experts = {match.group(1) for name, _ in experts_in(model) if (match := _LAYER.match(name))}
    layers: dict[str, list[str]] = {}
    heads: list[str] = []
    for name in names:
        match = _LAYER.match(name)
        if match is not None:
            layers.setdefault(match.group(1), []).append(_leaf(name))
        elif _leaf(name) in UNEMBED:
            heads.append(name)
    if not layers:
        raise ValueError(f"no linear layers of a known name found; LoRA can train {_known()}, and lm_head")
    if len(heads) != 1:
        raise ValueError(f"needs one lm_head, found {len(heads)}")
    for prefix, leaves in layers.items():
        if sorted(leaves) not in (dense if mlp and prefix not in with_experts else attention_alone):
            raise ValueError(
                f"the projections of {prefix} are none that LoRA can train: each layer needs, each once, {_known()}; "
                f"this layer has {_weights(model.get_submodule(prefix))}"
            )


def experts_in(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that hold the experts of a mixture's layers, with their names."""
    return [(name, module) for name, module in model.named_modules() if _leaf(name) == "experts"]


def wrap_experts(model: nn.Module, active: ActiveSegments) -> dict[str, MultiLoraExperts]:
    """Replace the experts of every layer by MultiLoraExperts, in module order. Raises ValueError for experts that
    adapters cannot train."""
    wrapped = {name: MultiLoraExperts(name, experts, active) for name, experts in experts_in(model)}
    for name, experts in wrapped.items():
        model.get_submodule(name.rpartition(".")[0]).experts = experts
    return wrapped


def _weights(layer: nn.Module) -> str:
    """The submodules with matrices of their own, for example `mlp.experts (GptOssExperts)`."""
    modules = ((name, each) for name, each in layer.named_modules() if name)
    named = [
        f"{name} ({type(each).__name__})"
        for name, each in modules
        if any(parameter.ndim > 1 for parameter in each.parameters(recurse=False))
    ]
    return ", ".join(named[:12]) + (f" and {len(named) - 12} more" if len(named) > 12 else "")


def _known() -> str:
    return "; or ".join(", ".join(attention + mlp) for attention, mlp in FORMS)


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def trained_targets(targets: Iterable[Target], spec: LoraSpec, *, mlp: bool = True) -> list[Target]:
    """The targets that the spec's train flags select, in the order given; without `mlp`, none of MLPs and experts."""
    leaves = ATTENTION * spec.train_attn + MLP * (spec.train_mlp and mlp) + UNEMBED * spec.train_unembed
    return [target for target in targets if _leaf(target.name) in leaves]
