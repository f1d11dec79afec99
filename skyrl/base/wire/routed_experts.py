"""The packed form of the loss input `routed_experts` (docs/howto/mixtures-of-experts.md): eight or four experts in each
int64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UNRECORDED = -1
IN_BYTES = 255
"""A model with at most so many experts has a byte for each in packed rows, and others have two. The largest number is
UNRECORDED."""


def packed(found: npt.NDArray[np.int32], experts: int) -> npt.NDArray[np.int64]:
    """int64 [N, ceil(width / 8)] from the experts of N tokens, int32 [N, width] with `UNRECORDED` where nothing is
    known; [N, ceil(width / 4)] if the model has more than 255 `experts`. Raises ValueError for an expert that a model
    of so many experts does not have."""
    if (largest := int(found.max(initial=UNRECORDED))) >= experts:
        raise ValueError(f"experts: {experts}, and expert {largest} was used: say how many experts the model has")
    kind = "u1" if experts <= IN_BYTES else "<u2"
    flat = found.astype(kind)  # -1 becomes the largest number
    return np.pad(flat, ((0, 0), (0, -flat.shape[1] % (8 // flat.itemsize)))).view("<i8").astype(np.int64, copy=False)
