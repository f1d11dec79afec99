"""Adapters of several ranks and layers in one stack of matrices. Each is there as if it had the highest rank and all
layers: what it lacks are zeros, which add nothing. The matrices have the adapters' scales in them.

A row of such a stack has, like an adapter's buffer, lora_A and lora_B of one layer after the other. Knows buffers of
adapters. Knows nothing of rows of a micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from skyrl.training.backends.torch_lora.adapter import Adapter, LoraPair, Target
from skyrl.training.backends.torch_lora.lora_product import GROUPED_RANKS


def grouped_rank(rank: int) -> int:
    """The smallest rank that grouped products take and that is not below `rank`."""
    return -(-rank // GROUPED_RANKS) * GROUPED_RANKS


@dataclass(frozen=True)
class AdapterStack:
    """Of adapters that train no experts. Needs memory like as many adapters of the highest rank with all layers: for
    the leaves, for the leaves' gradients, and for a copy of these in `gradients`."""

    adapters: Sequence[Adapter]

    @functools.cached_property
    def rank(self) -> int:
        """Of the matrices in the stack."""
        return grouped_rank(max(adapter.spec.rank for adapter in self.adapters))

    @functools.cached_property
    def targets(self) -> tuple[Target, ...]:
        """Every layer that one of the adapters trains. Those of the adapter with most come first, in its order, so that
        its buffer needs no other order."""
        ordered = sorted(self.adapters, key=lambda adapter: len(adapter.targets), reverse=True)
        return tuple({target.name: target for adapter in ordered for target in adapter.targets}.values())

    @property
    def row_numel(self) -> int:
        """Elements of the stack for each adapter."""
        return self.rank * sum(_sizes(self.targets))

    def leaves(self, requires_grad: bool, dtype: torch.dtype) -> dict[str, LoraPair]:
        """New autograd leaves, by target name: lora_A [adapters, rank, in_features], and scale * lora_B [adapters,
        out_features, rank], rounded once to `dtype`."""
        flat = torch.empty(len(self.adapters), self.row_numel, dtype=dtype, device=self.adapters[0].device)
        for alike in self._alike():
            self._write(self.adapters[alike], flat[alike])
        pieces = flat.split([self.rank * size for size in _sizes(self.targets)], dim=1)
        found: dict[str, LoraPair] = {}
        for target, of_a, of_b in zip(self.targets, pieces[::2], pieces[1::2], strict=True):
            lora_a = of_a.view(-1, self.rank, target.in_features).detach().requires_grad_(requires_grad)
            lora_b = of_b.view(-1, target.out_features, self.rank).detach().requires_grad_(requires_grad)
            found[target.name] = lora_a, lora_b
        return found

    def gradients(self, of_leaves: Iterable[Tensor]) -> list[Tensor]:
        """Each adapter's gradient, flat float32 in the order of its buffers, from those of the leaves. None shares
        memory with another: one that waits for its step does not keep the others."""
        rows = torch.cat([gradient.flatten(1) for gradient in of_leaves], dim=1)
        found: list[Tensor] = []
        for alike in self._alike():
            for adapter, own in zip(self.adapters[alike], self._cut(self.adapters[alike][0], rows[alike]), strict=True):
                # a gradient of scale * lora_B becomes one of lora_B
                found.append((own.view(-1, adapter.spec.rank) * _factors(adapter)).view(-1))
        return found

    def _alike(self) -> list[slice]:
        """Consecutive adapters of one rank with the same targets: their rows are written together."""
        kinds = groupby(self.adapters, lambda adapter: (adapter.spec.rank, adapter.targets))
        ends = [0, *accumulate(len([*adapters]) for _, adapters in kinds)]
        return [slice(*each) for each in pairwise(ends)]

    def _is_whole(self, adapter: Adapter) -> bool:
        """Whether a row of the stack has no zeros beside the adapter's matrices."""
        return adapter.spec.rank == self.rank and adapter.targets == self.targets

    def _write(self, adapters: Sequence[Adapter], rows: Tensor) -> None:
        """The matrices of adapters that are alike, scaled and padded, into their rows of the stack."""
        first, count = adapters[0], len(adapters)
        rank, more = first.spec.rank, self.rank - first.spec.rank
        if self._is_whole(first):
            for adapter, row in zip(adapters, rows, strict=True):
                torch.mul(adapter.weights.detach().view(-1, rank), _factors(adapter), out=row.view(-1, rank))
            return
        scaled = [adapter.weights.detach().view(-1, rank) * _factors(adapter) for adapter in adapters]
        flat = torch.stack([each.to(rows.dtype) for each in scaled]).view(count, -1)
        pieces = flat.split([rank * size for size in _sizes(first.targets)], dim=1)
        wide = pad(torch.cat(pieces[1::2], dim=1).view(count, -1, rank), (0, more)).view(count, -1)
        of_b = wide.split([self.rank * target.out_features for target in first.targets], dim=1)
        own = {target.name: pair for target, *pair in zip(first.targets, pieces[::2], of_b, strict=True)}
        widest = max(target.in_features + target.out_features for target in self.targets)
        zeros = rows.new_zeros(count, self.rank * widest)
        padded: list[Tensor] = []
        for target in self.targets:
            if target.name in own:
                lora_a, lora_b = own[target.name]
                padded += [lora_a, zeros[:, : more * target.in_features], lora_b]
            else:
                padded.append(zeros[:, : self.rank * (target.in_features + target.out_features)])
        torch.cat(padded, dim=1, out=rows)

    def _cut(self, adapter: Adapter, rows: Tensor) -> Tensor:
        """What belongs to adapters like this one of their rows of the stack: [adapters, numel]."""
        if self._is_whole(adapter):
            return rows
        rank, count = adapter.spec.rank, len(rows)
        pieces = rows.split([self.rank * size for size in _sizes(self.targets)], dim=1)
        pairs = {target.name: pair for target, *pair in zip(self.targets, pieces[::2], pieces[1::2], strict=True)}
        own = [pairs[target.name] for target in adapter.targets]
        wide = torch.cat([of_b for _, of_b in own], dim=1).view(count, -1, self.rank)
        narrow = wide[:, :, :rank].reshape(count, -1)
        of_b = narrow.split([rank * target.out_features for target in adapter.targets], dim=1)
        of_a = [pair[0][:, : rank * target.in_features] for pair, target in zip(own, adapter.targets, strict=True)]
        return torch.cat([*chain(*zip(of_a, of_b, strict=True))], dim=1)


def _sizes(targets: Sequence[Target]) -> tuple[int, ...]:
    """Of each matrix in an adapter's buffers, in order: its elements divided by the rank."""
    return tuple(size for target in targets for size in (target.in_features, target.out_features))


def _factors(adapter: Adapter) -> Tensor:
    """The scale where the adapter's buffers have lora_B, else 1: float32, one for each `rank` elements, [numel / rank,
    1]. Every matrix begins at a multiple of the rank, so none of these has elements of two."""
    return torch.where(_is_lora_b(_sizes(adapter.targets), adapter.device), adapter.scale, 1.0)[:, None]


@functools.lru_cache(maxsize=8)
def _is_lora_b(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """bool [sum of sizes]. Kept, because a copy to a GPU waits for the GPU; adapters of one base model have few
    different `sizes`."""
    is_b = torch.arange(len(sizes)) % 2 == 1
    return is_b.repeat_interleave(torch.tensor(sizes)).to(device)
