"""Adapters that are updated together: their matrices in one stack of tensors, padded to one rank and to the same
layers, and their gradients cut out of those of the stack.

Knows the flat buffers of adapters. Knows nothing of layers, of rows, or of which adapters are updated together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from skyrl.trainer.device import uploaded
from skyrl.trainer.lora.adapter import Adapter, LoraPair, Target

GROUPED_RANKS = 8
"""`grouped_mm` takes rows that begin at multiples of 16 bytes: in bfloat16, ranks that are multiples of this."""


def grouped_rank(rank: int) -> int:
    """The smallest rank that grouped products take and that is not below `rank`."""
    return -(-rank // GROUPED_RANKS) * GROUPED_RANKS


@dataclass(frozen=True)
class AdapterStack:
    """Adapters that train no experts, each with one rank in all its layers. The leaves need the memory of as many
    adapters that all have the highest rank and every layer of the stack. Their gradients need as much again, and
    `gradients` copies these once."""

    adapters: Sequence[Adapter]

    @functools.cached_property
    def rank(self) -> int:
        """The rank of every matrix in the stack."""
        return grouped_rank(max(adapter.spec.rank for adapter in self.adapters))

    @functools.cached_property
    def targets(self) -> tuple[Target, ...]:
        """The layers that any of the adapters trains. The adapter with the most layers gives the order: an adapter with
        all layers then lies in the stack as in its own buffer."""
        ordered = sorted(self.adapters, key=lambda adapter: len(adapter.targets), reverse=True)
        return tuple({target.name: target for adapter in ordered for target in adapter.targets}.values())

    @property
    def row_numel(self) -> int:
        """Elements of one row of the stack, which holds one adapter."""
        return self.rank * sum(_sizes(self.targets))

    def leaves(self, requires_grad: bool, dtype: torch.dtype) -> dict[str, LoraPair]:
        """New autograd leaves, by target name: lora_A [adapters, rank, in_features], and scale * lora_B [adapters,
        out_features, rank], rounded once to `dtype`."""
        flat = torch.empty(len(self.adapters), self.row_numel, dtype=dtype, device=self.adapters[0].device)
        for alike, factors in self._alike:
            self._write(self.adapters[alike], factors, flat[alike])
        pieces = flat.split([self.rank * size for size in _sizes(self.targets)], dim=1)
        found: dict[str, LoraPair] = {}
        for target, of_a, of_b in zip(self.targets, pieces[::2], pieces[1::2], strict=True):
            lora_a = of_a.view(-1, self.rank, target.in_features).detach().requires_grad_(requires_grad)
            lora_b = of_b.view(-1, target.out_features, self.rank).detach().requires_grad_(requires_grad)
            found[target.name] = lora_a, lora_b
        return found

    def gradients(self, of_leaves: Iterable[Tensor]) -> list[Tensor]:
        """Each adapter's gradient, flat float32 in the order of its buffers, from the gradients of the leaves. Each has
        its own memory, so that one that waits for its optimizer step does not keep the others."""
        rows = torch.cat([gradient.flatten(1) for gradient in of_leaves], dim=1)
        found: list[Tensor] = []
        for alike, factors in self._alike:
            first = self.adapters[alike][0]
            for own, of_own in zip(self._cut(first, rows[alike]), factors, strict=True):
                # a gradient of scale * lora_B becomes one of lora_B
                found.append((own.view(-1, first.spec.rank) * of_own).view(-1))
        return found

    @functools.cached_property
    def _alike(self) -> list[tuple[slice, Tensor]]:
        """Runs of consecutive adapters with the same rank and targets, and their `_factors`. A run is padded at once:
        the host's time depends on the number of ranks rather than of adapters."""
        kinds = groupby(self.adapters, lambda adapter: (adapter.spec.rank, adapter.targets))
        ends = [0, *accumulate(len([*adapters]) for _, adapters in kinds)]
        runs = [slice(*each) for each in pairwise(ends)]
        of_all = np.array([adapter.scale for adapter in self.adapters], np.float32)
        (scales,) = uploaded([of_all], self.adapters[0].device)
        return [(run, _factors(self.adapters[run.start], scales[run])) for run in runs]

    def _is_whole(self, adapter: Adapter) -> bool:
        """Whether the adapter needs no padding."""
        return adapter.spec.rank == self.rank and adapter.targets == self.targets

    def _write(self, adapters: Sequence[Adapter], factors: Tensor, rows: Tensor) -> None:
        """Write adapters with the same rank and targets, scaled and padded, into their rows of the stack."""
        first, count = adapters[0], len(adapters)
        rank, more = first.spec.rank, self.rank - first.spec.rank
        if self._is_whole(first):
            self._scale(adapters, factors, rows)
            return
        flat = rows.new_empty(count, first.weights.numel())
        self._scale(adapters, factors, flat)
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

    @staticmethod
    def _scale(adapters: Sequence[Adapter], factors: Tensor, rows: Tensor) -> None:
        """Write adapters of one rank into rows [adapters, numel], as they lie in their buffers, scaled."""
        rank = adapters[0].spec.rank
        for adapter, own, row in zip(adapters, factors, rows, strict=True):
            torch.mul(adapter.weights.detach().view(-1, rank), own, out=row.view(-1, rank))

    def _cut(self, adapter: Adapter, rows: Tensor) -> Tensor:
        """Rows of gradients without the padding: [adapters, numel]. The adapters have this one's rank and targets."""
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
    """For each matrix in an adapter's buffer, in order, the number of its elements divided by the rank."""
    return tuple(size for target in targets for size in (target.in_features, target.out_features))


def _factors(adapter: Adapter, scales: Tensor) -> Tensor:
    """For adapters with this one's rank and targets, and with these scales, the factor of each `rank` elements of a
    buffer: the adapter's scale for lora_B, 1 for lora_A. float32 [adapters, numel / rank, 1]. Every matrix begins at a
    multiple of the rank, so these elements never belong to two matrices."""
    is_a, is_b = _which_matrix(_sizes(adapter.targets), adapter.device)
    return torch.addcmul(is_a, scales[:, None], is_b)[..., None]


@functools.lru_cache(maxsize=4)
def _which_matrix(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where lora_A is and where lora_B is, each 0.0 or 1.0, [sum of sizes]. Cached, because a copy to a GPU waits for
    the GPU. The adapters of one base model have few different `sizes`."""
    is_b = (torch.arange(len(sizes)) % 2).float().repeat_interleave(torch.tensor(sizes)).to(device)
    return 1 - is_b, is_b
