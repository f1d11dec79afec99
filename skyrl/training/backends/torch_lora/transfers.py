"""Copies between host and device: many arrays in one copy.

Each copy costs the host a call, and each copy to the host waits until the device has computed what it copies. Knows
arrays. Knows nothing of what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.training.backends.torch_lora.device import ALIGNMENT


def uploaded(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, in shape [elements], from one copy. They share one buffer."""
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    starts = [0, *accumulate(sizes)]
    # From pinned memory the copy does not wait for what the device computes
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    of_host = host.numpy()
    for array, start in zip(arrays, starts, strict=False):
        of_host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    on_device = host.to(device, non_blocking=True)
    return [
        on_device[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
        for array, start in zip(arrays, starts, strict=False)
    ]


def read_back(
    numbers: Sequence[Tensor], logprobs: Sequence[Tensor]
) -> tuple[list[npt.NDArray[np.float64]], list[npt.NDArray[np.float32]]]:
    """Copies on the host. numbers: float64 [n] each; logprobs: float32 [n] each. Waits for the device once."""
    words = [tensor.detach().view(torch.int32) for tensor in (*numbers, *logprobs)]
    found = iter(np.split(torch.cat(words).cpu().numpy(), [*accumulate(map(len, words))][:-1]))
    # float64 comes first, so that each array begins at a multiple of its width
    return [next(found).view(np.float64) for _ in numbers], [next(found).view(np.float32) for _ in logprobs]
