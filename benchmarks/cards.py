"""What GPUs can do by NVIDIA's data sheets: the figures that MFU and estimates divide by."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Card(NamedTuple):
    """Per second: products of bfloat16 (dense, without sparsity) and of float32 in TFLOP, and TB of memory."""

    bf16_tflops: float
    fp32_tflops: float
    terabytes: float

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP per second of products of this dtype. torch computes those of float32 without tensor cores."""
        return 1e12 * (self.fp32_tflops if dtype == torch.float32 else self.bf16_tflops)

    def seconds(self, flop: float, moved: float, dtype: torch.dtype) -> float:
        """The roofline's bound for one operation that moves so many bytes ("Roofline: An Insightful Visual Performance
        Model", Williams et al., CACM 2009)."""
        return max(flop / self.peak(dtype), moved / (1e12 * self.terabytes))


CARDS = {
    "H200": Card(989, 67, 4.8),
    "H100 PCIe": Card(756, 51, 2.0),
    "H100": Card(989, 67, 3.35),
    "A100": Card(312, 19.5, 2.039),
    "L40S": Card(362, 91.6, 0.864),
}
"""By a part of CUDA's name of a GPU. The first part that fits counts."""


def card_here() -> Card | None:
    """This machine's GPU; None without one, or for one that is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((card for part, card in CARDS.items() if part in name), None)
