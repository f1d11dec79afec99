"""Adapters on experts in PEFT's files: one pair of matrices for each expert, or one for all experts of a layer.

Where a release has gate and up in one tensor of all experts, PEFT trains that tensor itself (`target_parameters`), and
vLLM reads what PEFT writes: for the experts `<experts>`, the pair of `gate_up_proj` as `<experts>.base_layer`, and the
pair of `down_proj` as `<experts>`, because one wraps the other. lora_A is [experts * rank, inputs] with the expert
first, lora_B [outputs, rank * experts] with the rank first. Elsewhere a pair is `<experts>.<number>.<projection>`.

Knows names and shapes. Knows nothing of files or base models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl.training.backends.torch_lora.adapter import Target

FUSED = "gate_up_proj"
_FUSED_NAMES = {FUSED: ".base_layer", "down_proj": ""}


def fused_experts(targets: Sequence[Target]) -> frozenset[str]:
    """The modules of experts, by name, whose adapter has one pair for gate and up."""
    found = (target.name.rpartition(".") for target in targets if target.experts is not None)
    return frozenset(module for module, _, leaf in found if leaf == FUSED)


def split(name: str, matrices: Tensor, fused: frozenset[str]) -> dict[str, Tensor]:
    """What a file holds for all experts' matrices. name: `<experts>.<projection>.lora_A`; matrices: [experts, rank,
    inputs], or for lora_B [experts, outputs, rank]. `fused`: see `fused_experts`."""
    experts, projection, which = name.rsplit(".", 2)
    if experts not in fused:
        return {f"{experts}.{number}.{projection}.{which}": matrix for number, matrix in enumerate(matrices)}
    joined = matrices.flatten(0, 1) if which == "lora_A" else matrices.permute(1, 2, 0).flatten(1)
    return {f"{experts}{_FUSED_NAMES[projection]}.{which}": joined}


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
