"""Rounds weights to integers of 4 or 8 bits, as compressed-tensors packs them. Knows numbers alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scheme:
    """Symmetric integers of `bits` bits, and a factor for each group of `group_size` columns of a row. 32 must divide
    `group_size`."""

    bits: int
    group_size: int

    def packed_columns(self, columns: int) -> int:
        return columns * self.bits // 32

    def rounded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest integers of rows [n, columns], packed: int32 [n, columns * bits / 32]; and the groups' factors,
        bfloat16 [n, columns / group_size].

        The largest number of a group comes half a step beyond the largest integer: so steps are smaller, and it is
        rounded by half a step at most as all others are. Integers are computed with factors that are rounded already.
        Raises ValueError for numbers that are not finite."""
        groups = rows.float().unflatten(1, (-1, self.group_size))
        half = 2 ** (self.bits - 1)
        factors = (groups.abs().amax(-1) / (half - 0.5)).bfloat16()
        if not bool(factors.isfinite().all()):
            raise ValueError("it has numbers that are not finite")
        divisors = torch.where(factors == 0, 1.0, factors.float())
        integers = (groups / divisors[..., None]).round_().clamp_(-half, half - 1).add_(half).flatten(1).int()
        count = 32 // self.bits
        packed = torch.zeros(len(rows), self.packed_columns(rows.shape[1]), dtype=torch.int32)
        for place in range(count):
            packed |= integers[:, place::count] << (self.bits * place)
        return packed, factors

    def described(self, ignored: list[str]) -> dict[str, Any]:
        """config.json's `quantization_config`. `ignored`: the names of layers that are not quantized."""
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": ignored,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {
                        "num_bits": self.bits,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": self.group_size,
                        "dynamic": False,
                        "actorder": None,
                        "block_structure": None,
                        "observer": "minmax",
                        "observer_kwargs": {},
                    },
                }
            },
        }
