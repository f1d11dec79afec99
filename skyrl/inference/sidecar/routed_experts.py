"""The experts that computed each token: vLLM's `.npy` file in base64 as SGLang's int32 numbers in base64."""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

import numpy as np

from skyrl.inference.sidecar.errors import NotOffered, VllmBroke


def routed_experts(
    encoded: str | None, prompt: int, sampled: int, start: int, *, scoring: bool = False, aborted: bool = False
) -> dict[str, Any]:
    """The fields of `meta_info` for a prompt and a sample of so many tokens, without the first `start` rows; nothing if
    no token has been computed. `scoring`: without the rows of the sample. Raises NotOffered if vLLM does not record the
    experts, VllmBroke if they do not fit the tokens."""
    if encoded is None:
        if sampled:
            raise NotOffered("return_routed_experts: vLLM was started without --enable-return-routed-experts")
        return {}
    rows = prompt + sampled - 1 - start
    try:
        experts = to_int32(encoded, rows, rows - sampled if scoring else rows)
    except VllmBroke:
        if not aborted:
            raise
        return {}  # an aborted request is always answered: a client would sample it again after an error
    return {"routed_experts": experts, "routed_experts_start_len": start}


def to_int32(encoded: str, rows: int, kept: int) -> str:
    """`encoded` holds an array of integers [rows, layers, experts per token] in base64 of an `.npy` file. Returns the
    first `kept` rows as little-endian int32 in C order, in base64. Raises VllmBroke if the array has another shape."""
    try:
        array = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise VllmBroke(f"vLLM's routed_experts cannot be read: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 3 or array.shape[0] != rows:
        raise VllmBroke(f"vLLM's routed_experts have the shape {getattr(array, 'shape', None)} for {rows} tokens")
    if array.dtype.kind not in "iu" or (array.size and int(array.max()) > np.iinfo(np.int32).max):
        raise VllmBroke(f"vLLM's routed_experts are {array.dtype}, not numbers of experts")
    return base64.b64encode(np.ascontiguousarray(array[:kept], "<i4").tobytes()).decode()
