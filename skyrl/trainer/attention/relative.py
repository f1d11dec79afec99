"""Biases of attention scores that depend on the distance between query and key, and on the query: Inkling's.

Each query has a few numbers, `states`, with which it mixes trained profiles of bias against distance: the bias of the
key that is d tokens before the query is the mixture's number d, and 0 beyond the profiles' extent. They are made for a
block of scores at a time. Knows nothing of kernels, modules or rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def bias_of(states: Tensor, profiles: Tensor, distance: Tensor) -> Tensor:
    """states: [..., q, n]; profiles: [n, extent]; distance: int64 [q, k], from key to query. Returns [..., q, k]: the
    product of the query's states with the profiles' column of its distance, 0 for distances outside [0, extent)."""
    extent = profiles.shape[1]
    mixed = states @ profiles
    columns = distance.clamp(0, extent - 1).expand(*mixed.shape[:-1], -1)
    return mixed.gather(-1, columns).masked_fill((distance < 0) | (distance >= extent), 0.0)


@dataclass(frozen=True)
class RelativeBias:
    """Of some queries. states: [..., q, n]; profiles: [n, extent]."""

    states: Tensor
    profiles: Tensor

    @property
    def extent(self) -> int:
        return self.profiles.shape[1]

    def zeros(self) -> RelativeBias:
        """float32, of the same shapes."""
        states, profiles = (torch.zeros_like(each, dtype=torch.float32) for each in (self.states, self.profiles))
        return RelativeBias(states, profiles)
