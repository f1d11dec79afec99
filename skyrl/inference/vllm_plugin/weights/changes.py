"""A version of the weights made of an earlier one, whose bytes were kept, and of files with what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from skyrl.inference.vllm_plugin.weights.checkpoint import Entry, tensors
from skyrl.inference.vllm_plugin.weights.errors import WeightsError
from skyrl.inference.vllm_plugin.weights.staging import Needed, Staged
from skyrl.weights.deltas import POSITIONS, VALUES, patch
from skyrl.weights.digests import digest


def make(
    staged: Staged,
    found: Mapping[str, Entry],
    needed: Needed,
    checksums: Mapping[str, str],
    stopped: Callable[[], bool],
    in_model: Callable[[torch.Tensor], bool],
) -> None:
    """Change `staged`, which has the tensors of the earlier version, in place. Raises WeightsError; then its tensors
    are of no version."""
    positions: dict[str, torch.Tensor] = {}
    for name, tensor in tensors(dict(sorted(found.items())), stopped, torch.empty):
        of = name.removesuffix(POSITIONS).removesuffix(VALUES)
        if of == name:
            staged.add(needed, name, tensor, None, in_model)
        elif of not in staged.tensors:
            raise WeightsError(f"base: it has no {of}")
        elif name.endswith(POSITIONS):  # which are before the values, by name
            positions[of] = tensor
        else:
            needed.check_values(of, tensor)
            try:
                patch(staged.tensors[of], positions.pop(of), tensor)
            except (KeyError, ValueError) as error:
                raise WeightsError(f"{of}: its positions and values do not fit: {error}") from error
    for name, wanted in checksums.items():
        if name in staged.tensors and (made := digest(name, staged.tensors[name])) != wanted:
            raise WeightsError(f"checksums: {name} was made with the digest {made}, not {wanted}")
