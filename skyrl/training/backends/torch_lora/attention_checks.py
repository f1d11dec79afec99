"""Checks at start-up that packed rows attend as transformers' attention would, also beyond the few tokens of the probe.

Registers an attention with transformers that computes nothing and notes what each layer asks for. Knows nothing of
packed rows or adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "skyrl_noted"
_FAR = 4096
"""Queries are compared at least this far from the first token. Chunks and windows are rarely longer."""

MaskFunction = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asks its attention for. `sees` is transformers' mask: it gets indices of the batch, head, query
    and key, and returns whether the query sees the key; None: the layer has no mask."""

    layer: str
    window: int | None
    sees: MaskFunction | None
    options: tuple[str, ...]

    def check(self) -> None:
        """Raise ValueError unless the layer's mask is that of a causal window of `window` tokens (None: all before)."""
        if self.options:
            raise ValueError(f"{self.layer}: attention with {', '.join(self.options)} is not supported")
        if self.sees is None:
            raise ValueError(f"{self.layer}: attention without a causal mask is not supported")
        window = self.window or _FAR
        queries = {0, 1, window - 1, window, window + 1, 2 * window - 1, 2 * window, 3 * window + 1, _FAR}
        distances = {-1, 0, 1, window - 1, window, window + 1, 2 * window}
        query = torch.tensor([q for q in sorted(queries) for _ in distances])
        key = query - torch.tensor(sorted(distances)).repeat(len(queries))
        query, key = query[key >= 0], key[key >= 0]
        first = torch.zeros_like(query)
        seen = torch.as_tensor(self.sees(first, first, query, key)).expand(query.shape)
        expected = query >= key
        if self.window is not None:
            expected &= query - key < self.window
        wrong = (seen != expected).nonzero()
        if len(wrong):
            at = int(wrong[0])
            verb = "sees" if bool(seen[at]) else "does not see"
            kind = "causal attention" if self.window is None else f"a causal window of {self.window} tokens"
            raise ValueError(
                f"{self.layer}: the mask is not that of {kind}: token {int(query[at])} {verb} token {int(key[at])}; "
                "chunked, bidirectional and other masks are not supported"
            )


class _NotedMask:
    """Travels through the model's layers in the place of a mask."""

    def __init__(self, sees: MaskFunction) -> None:
        self.sees = sees


_calls: list[AttentionCall] = []


@contextmanager
def noted_calls(model: Any) -> Iterator[list[AttentionCall]]:
    """Inside, the model's attention computes nothing, and the list gets what each layer asks for."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _calls.clear()
    try:
        yield _calls
    finally:
        model.set_attn_implementation(before)


_COMPUTED_BY_PACKED_ROWS = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal"}
_WITHOUT_EFFECT = {
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}


def _note(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _NotedMask | None,
    *,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    known = _COMPUTED_BY_PACKED_ROWS | _WITHOUT_EFFECT
    unknown = tuple(sorted(name for name, given in kwargs.items() if given is not None and name not in known))
    layer = f"layer {getattr(module, 'layer_idx', len(_calls))} ({type(module).__name__})"
    sees = attention_mask.sees if isinstance(attention_mask, _NotedMask) else None
    _calls.append(AttentionCall(layer, sliding_window, sees, unknown))
    count, heads, rows, _ = query.shape
    return value.new_zeros(count, rows, heads, value.shape[-1]), None


def _note_mask(*args: Any, mask_function: MaskFunction, **kwargs: Any) -> Any:
    return _NotedMask(mask_function)


AttentionInterface.register(NAME, _note)
AttentionMaskInterface.register(NAME, _note_mask)  # pyright: ignore[reportArgumentType]  # gives no tensor
