"""Adapters of several ranks in one stack of matrices, each as if it had the highest rank: the other rows of lora_A and
columns of lora_B are zero, so they add nothing. The matrices have the adapters' scales in them.

A row of such a stack has, like an adapter's buffer, lora_A and lora_B of one layer after the other. Knows buffers of
adapters. Knows nothing of rows of a micro-batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from skyrl.training.backends.torch_lora.adapter import Adapter, LoraPair
from skyrl.training.backends.torch_lora.lora_product import GROUPED_RANKS


def grouped_rank(rank: int) -> int:
    """The smallest rank that grouped products take and that is not below `rank`."""
    return -(-rank // GROUPED_RANKS) * GROUPED_RANKS


@dataclass(frozen=True)
class AdapterStack:
    """Of adapters with the same targets, none of which are experts. Needs memory like as many adapters of the highest
    rank: for the leaves, for the leaves' gradients, and for a copy of these in `gradients`."""

    adapters: Sequence[Adapter]

    @functools.cached_property
    def rank(self) -> int:
        """Of the matrices in the stack."""
        return grouped_rank(max(adapter.spec.rank for adapter in self.adapters))

    def leaves(self, requires_grad: bool, dtype: torch.dtype) -> dict[str, LoraPair]:
        """New autograd leaves, by target name: lora_A [adapters, rank, in_features], and scale * lora_B [adapters,
        out_features, rank], rounded once to `dtype`."""
        first = self.adapters[0]
        rows = len(self.adapters), first.weights.numel() // first.spec.rank * self.rank
        flat = torch.empty(rows, dtype=dtype, device=first.device)
        for row, adapter in zip(flat, self.adapters, strict=True):
            self._write(adapter, row)
        pieces = flat.split([self.rank * size for size in _sizes(first)], dim=1)
        found: dict[str, LoraPair] = {}
        for target, of_a, of_b in zip(first.targets, pieces[::2], pieces[1::2], strict=True):
            lora_a = of_a.view(-1, self.rank, target.in_features).detach().requires_grad_(requires_grad)
            lora_b = of_b.view(-1, target.out_features, self.rank).detach().requires_grad_(requires_grad)
            found[target.name] = lora_a, lora_b
        return found

    def gradients(self, of_leaves: Iterable[Tensor]) -> list[Tensor]:
        """Each adapter's gradient, flat float32 in the order of its buffers, from those of the leaves. None shares
        memory with another: one that waits for its step does not keep the others."""
        rows = torch.cat([gradient.flatten(1) for gradient in of_leaves], dim=1)
        return [self._own(adapter, row) for adapter, row in zip(self.adapters, rows, strict=True)]

    def _write(self, adapter: Adapter, row: Tensor) -> None:
        """The adapter's matrices, scaled and padded, into its row of the stack."""
        rank = adapter.spec.rank
        if rank == self.rank:
            torch.mul(adapter.weights.detach().view(-1, rank), _factors(adapter), out=row.view(-1, rank))
            return
        scaled = (adapter.weights.detach().view(-1, rank) * _factors(adapter)).to(row.dtype).view(-1)
        pieces = scaled.split([rank * size for size in _sizes(adapter)])
        wide = pad(torch.cat(pieces[1::2]).view(-1, rank), (0, self.rank - rank)).view(-1)
        of_b = wide.split([self.rank * target.out_features for target in adapter.targets])
        zeros = [(self.rank - rank) * target.in_features for target in adapter.targets]
        none = row.new_zeros(max(zeros))
        padded = zip(pieces[::2], (none[:size] for size in zeros), of_b, strict=True)
        torch.cat([*itertools.chain(*padded)], out=row)

    def _own(self, adapter: Adapter, row: Tensor) -> Tensor:
        """The adapter's own part of a row of gradients. A gradient of scale * lora_B becomes one of lora_B."""
        rank = adapter.spec.rank
        if rank < self.rank:
            more = self.rank - rank
            sizes = [
                size
                for target in adapter.targets
                for size in (rank * target.in_features, more * target.in_features, self.rank * target.out_features)
            ]
            pieces = row.split(sizes)
            wide = torch.cat(pieces[2::3]).view(-1, self.rank)
            of_b = wide[:, :rank].reshape(-1).split([rank * target.out_features for target in adapter.targets])
            row = torch.cat([*itertools.chain(*zip(pieces[::3], of_b, strict=True))])
        return (row.view(-1, rank) * _factors(adapter)).view(-1)


def _sizes(adapter: Adapter) -> tuple[int, ...]:
    """Of each matrix in the adapter's buffers, in order: its elements divided by the rank."""
    return tuple(size for target in adapter.targets for size in (target.in_features, target.out_features))


def _factors(adapter: Adapter) -> Tensor:
    """The scale where the adapter's buffers have lora_B, else 1: float32, one for each `rank` elements, [numel / rank,
    1]. Every matrix begins at a multiple of the rank, so none of these has elements of two."""
    return torch.where(_is_lora_b(_sizes(adapter), adapter.device), adapter.scale, 1.0)[:, None]


@functools.lru_cache(maxsize=8)
def _is_lora_b(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """bool [sum of sizes]. Kept, because a copy to a GPU waits for the GPU; adapters of one base model have few
    different `sizes`."""
    is_b = torch.arange(len(sizes)) % 2 == 1
    return is_b.repeat_interleave(torch.tensor(sizes)).to(device)
