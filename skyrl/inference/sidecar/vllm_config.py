"""How vLLM was started, as fields of SGLang's `/server_info`. Clients read the sizes before they use a server."""

from __future__ import annotations

import asyncio
from typing import Any

from skyrl.inference.sidecar.errors import BadRequest, NotOffered, VllmBroke
from skyrl.inference.sidecar.vllm import Vllm

TIMEOUT_S = 25.0
"""vLLM looks at its whole machine for the first answer, which takes seconds. Clients wait 30 s."""


class KnownConfig:
    """Asks vLLM once."""

    def __init__(self, vllm: Vllm) -> None:
        self._vllm = vllm
        self._asking = asyncio.Lock()
        self._known: dict[str, Any] | None = None
        self._device: Any = None
        self._only_text = False

    async def device(self) -> str | None:
        """Such as `cuda` or `cpu`; None if vLLM does not tell. Raises VllmAway."""
        await self.get()
        return self._device

    async def only_text(self) -> bool:
        """Whether vLLM was started without its vision tower; False if vLLM does not tell. Raises VllmAway."""
        await self.get()
        return self._only_text

    async def get(self) -> dict[str, Any]:
        """Empty if vLLM does not tell. Raises VllmAway."""
        async with self._asking:
            if self._known is None:
                try:
                    answer = await self._vllm.call("GET", "/server_info?config_format=json", timeout_s=TIMEOUT_S)
                except (NotOffered, VllmBroke, BadRequest):
                    return {}
                config = answer.get("vllm_config") if isinstance(answer, dict) else None
                self._device = _part(config, "device_config").get("device")
                pictures = _part(_part(config, "model_config"), "multimodal_config")
                self._only_text = pictures.get("language_model_only") is True
                self._known = _fields(config)
        return self._known


def _fields(config: Any) -> dict[str, Any]:
    """What vLLM's configuration has of SGLang's fields; what it has not is left out."""
    fields: dict[str, Any] = {}
    parallel, model = (_part(config, name) for name in ("parallel_config", "model_config"))
    sizes = {"tp_size": "tensor_parallel_size", "pp_size": "pipeline_parallel_size", "dp_size": "data_parallel_size"}
    for ours, theirs in sizes.items():
        if type(size := parallel.get(theirs)) is int:
            fields[ours] = size
    if "tp_size" in fields and "pp_size" in fields:
        fields["num_gpus"] = fields["tp_size"] * fields["pp_size"]
        if parallel.get("enable_expert_parallel") is False:
            fields["ep_size"] = 1
    if isinstance(dtype := model.get("dtype"), str):
        fields["dtype"] = dtype.removeprefix("torch.")
    if isinstance(sleeps := model.get("enable_sleep_mode"), bool):
        fields["enable_memory_saver"] = sleeps
    if isinstance(experts := _part(config, "aux_output_config").get("enable_return_routed_experts"), bool):
        fields["enable_return_routed_experts"] = experts
    return fields


def _part(config: Any, name: str) -> dict[str, Any]:
    part = config.get(name) if isinstance(config, dict) else None
    return part if isinstance(part, dict) else {}
