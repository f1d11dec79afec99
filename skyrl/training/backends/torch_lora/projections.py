"""Which linear layers of a base model adapters can train: their names, and how they are found and wrapped.

Knows transformers' names of projections. Knows nothing of adapters' weights or of how a wrapped layer computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from skyrl.base.types.weights import LoraSpec
from skyrl.training.backends.torch_lora.adapter import Target
from skyrl.training.backends.torch_lora.lora import ActiveSegments, MultiLoraLinear
from skyrl.training.backends.torch_lora.lora_experts import MultiLoraExperts


@dataclass(frozen=True)
class Form:
    """The linear layers of the decoder layers of some families. A decoder layer has those of one of the `mixers`, which
    let tokens read earlier ones, and of `mlp`, each once. With `apart`, it has those of a mixer or of `mlp`. `frozen`:
    others that it may have, which no adapter changes."""

    mixers: tuple[tuple[str, ...], ...]
    mlp: tuple[str, ...]
    apart: bool = False
    frozen: tuple[str, ...] = ()

    def fits(self, leaves: Sequence[str], *, with_experts: bool) -> bool:
        """Whether a decoder layer may have these linear layers. The MLP of one with experts may be missing."""
        if self.apart:
            allowed = [*self.mixers, self.mlp, *[()] * with_experts]
        else:
            allowed = [mixer + self.mlp for mixer in self.mixers] + [*self.mixers] * with_experts
        return sorted(leaf for leaf in leaves if leaf not in self.frozen) in map(sorted, allowed)


FORMS = (
    Form(
        (
            ("q_proj", "k_proj", "v_proj", "o_proj"),
            ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),  # the gated delta rule of Qwen3.5
            ("in_proj_qkvz", "in_proj_ba", "out_proj"),  # of Qwen3-Next
            ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),  # latent attention of DeepSeek
            ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
            (*("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj"), *("b_proj", "g_a_proj", "g_b_proj", "o_proj")),
        ),  # the last one: the delta rule of Kimi-Linear
        ("gate_proj", "up_proj", "down_proj"),
        frozen=("shared_expert_gate", "kv_b_proj"),
    ),
    Form((("qkv_proj", "o_proj"),), ("gate_up_proj", "down_proj")),  # Phi-3
    Form((("q_proj", "k_proj", "v_proj", "dense"),), ("fc1", "fc2")),  # Phi
    Form(
        (("q_proj", "k_proj", "v_proj", "o_proj"), ("in_proj",)),
        ("up_proj", "down_proj"),
        apart=True,
        frozen=("out_proj", "fc1_latent_proj", "fc2_latent_proj"),
    ),
)
"""A fused projection is one layer with one pair of matrices, as PEFT and vLLM have it. vLLM must load adapters on all
of a form: GLM-4, with the attention of the first and the MLP of the second form, is none, because vLLM wants its MLP in
parts. The last form is that of Nemotron-H, with Mamba-2 as its other mixer. Frozen layers are those whose adapters vLLM
would ignore, and Mamba-2's `out_proj`, which PEFT refuses."""

UNEMBED = ("lm_head",)
ATTENTION = tuple(dict.fromkeys(leaf for form in FORMS for mixer in form.mixers for leaf in mixer))
MLP = tuple(dict.fromkeys(leaf for form in FORMS for leaf in form.mlp))
_LAYER = re.compile(r"^(.*\blayers\.\d+)\.")


def wrap_linears(model: nn.Module, active: ActiveSegments, *, mlp: bool = True) -> dict[str, MultiLoraLinear]:
    """Replace every linear layer that adapters can train by a MultiLoraLinear. Returns the new layers in module order.
    Without `mlp` the MLPs of all layers stay as they are.

    Raises ValueError unless the linear layers of each decoder layer are those of one of `FORMS` (the MLP of a layer
    that has experts may be missing), and the model has one lm_head: otherwise other projections would silently stay
    untrained.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    forms = _forms(model, list(linears))
    wrapped: dict[str, MultiLoraLinear] = {}
    for name, linear in linears.items():
        parent, _, leaf = name.rpartition(".")
        match = _LAYER.match(name)
        form = forms[match.group(1)] if match is not None else None
        if leaf in UNEMBED if form is None else leaf not in form.frozen and (mlp or leaf not in form.mlp):
            wrapped[name] = MultiLoraLinear(name, linear, active)
            setattr(model.get_submodule(parent), leaf, wrapped[name])
    return wrapped


def _forms(model: nn.Module, names: Sequence[str]) -> dict[str, Form]:
    """The form of each decoder layer with linear layers, by the layer's name. names: of all linear layers."""
    with_experts = {match.group(1) for name, _ in experts_in(model) if (match := _LAYER.match(name))}
    layers: dict[str, list[str]] = {}
    heads: list[str] = []
    for name in names:
        match = _LAYER.match(name)
        if match is not None:
            layers.setdefault(match.group(1), []).append(_leaf(name))
        elif _leaf(name) in UNEMBED:
            heads.append(name)
    if not any(leaf in ATTENTION for leaves in layers.values() for leaf in leaves):
        raise ValueError(f"no linear layers of a known name found; LoRA can train {_known()}, and lm_head")
    if len(heads) != 1:
        raise ValueError(f"needs one lm_head, found {len(heads)}")
    forms: dict[str, Form] = {}
    for prefix, leaves in layers.items():
        fitting = [form for form in FORMS if form.fits(leaves, with_experts=prefix in with_experts)]
        if not fitting:
            raise ValueError(
                f"the projections of {prefix} are none that LoRA can train: each layer needs, each once, {_known()}; "
                f"this layer has {_weights(model.get_submodule(prefix))}"
            )
        forms[prefix] = fitting[0]
    return forms


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
    return "; or ".join(", ".join(form.mixers[0] + form.mlp) for form in FORMS if not form.apart)


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def trained_targets(targets: Iterable[Target], spec: LoraSpec, *, mlp: bool = True) -> list[Target]:
    """The targets that the spec's train flags select, in the order given; without `mlp`, none of MLPs and experts."""
    of_mlp = spec.train_mlp and mlp
    leaves = ATTENTION * spec.train_attn + MLP * of_mlp + UNEMBED * spec.train_unembed
    return [each for each in targets if (of_mlp if each.experts is not None else _leaf(each.name) in leaves)]
