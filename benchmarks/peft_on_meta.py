"""The loop over PEFT on torch's meta device, with the operations that CUDA would start.

torch has no autocast for the meta device, so products cast their arguments here. Where the loop asks for numbers of a
mask, it gets what the batch's lengths say. Knows the loop. Knows nothing of what is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import trainer_ways
from benchmarks.on_meta import META
from benchmarks.trainer_ways import PeftWay


class PeftOnMeta(PeftWay):
    """With padded rows. To be made and used within `peft_on_meta`, inside `on_meta.as_on_meta`."""

    def __init__(self, model: str) -> None:
        super().__init__(model, 1, packed=False)

    def _padded_logprobs(self, data: Sequence[Any]) -> Tensor:
        with _Masks([len(datum.tokens) for datum in data]):
            return super()._padded_logprobs(data)


@contextmanager
def peft_on_meta() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch.object(trainer_ways, "plain_device", lambda threads: META))
        stack.enter_context(patch.object(AutoModelForCausalLM, "from_pretrained", _without_weights))
        stack.enter_context(patch.object(torch, "autocast", lambda *_, **__: nullcontext()))
        stack.enter_context(patch.object(functional, "linear", _autocast_linear))
        stack.enter_context(patch("torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["meta"]))
        yield


def _without_weights(path: str, *, dtype: torch.dtype, attn_implementation: str) -> Any:
    with META:
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), dtype=dtype, attn_implementation=attn_implementation
        )


_linear = functional.linear


def _autocast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As under autocast in bfloat16: adapters' matrices are float32."""
    return _linear(x.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16())


class _Masks(TorchDispatchMode):
    """Inside, masks of padding have the numbers that sequences of these lengths have."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self._tokens, self._is_full = sum(lengths), min(lengths) == max(lengths)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and args[0].dtype == torch.bool:
            return self._is_full
        if name == "index" and args[1][0].dtype == torch.bool:
            return args[0].new_empty(self._tokens)
        return func(*args, **(kwargs or {}))
