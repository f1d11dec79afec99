"""SGLang's routes that load and unload LoRA adapters, on vLLM's own."""

from __future__ import annotations

from typing import Any

from skyrl.inference.sidecar.call import Call
from skyrl.inference.sidecar.errors import BadRequest, NotOffered, VllmBroke
from skyrl.inference.sidecar.fields import string
from skyrl.inference.sidecar.parameters import parameters
from skyrl.inference.sidecar.vllm import Vllm

TIMEOUT_S = 300.0


class Adapters:
    """Each answer has all adapters that are loaded: `{name: path}`."""

    def __init__(self, vllm: Vllm) -> None:
        self._vllm = vllm

    async def load(self, call: Call) -> None:
        """400 for a name that is loaded already. `pinned` is ignored: vLLM forgets no adapter by itself."""
        given = await parameters(call)
        name, path = (string(field, given.get(field)) for field in ("lora_name", "lora_path"))
        await self._change(call, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload(self, call: Call) -> None:
        name = string("lora_name", (await parameters(call)).get("lora_name"))
        await self._change(call, "/v1/unload_lora_adapter", {"lora_name": name})

    async def _change(self, call: Call, path: str, body: dict[str, Any]) -> None:
        refusal = ""
        try:
            await self._vllm.call_raw("POST", path, body, timeout_s=TIMEOUT_S)
        except NotOffered as error:
            raise NotOffered("vLLM was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING or --enable-lora") from error
        except BadRequest as error:
            refusal = error.message
        answer = {"success": not refusal, "error_message": refusal, "loaded_adapters": await self._loaded()}
        await call.answer_json(answer, 400 if refusal else 200)

    async def _loaded(self) -> dict[str, str]:
        answer = await self._vllm.call("GET", "/v1/models")
        try:
            return {one["id"]: one["root"] for one in answer["data"] if one.get("parent")}
        except (TypeError, KeyError, AttributeError) as error:
            raise VllmBroke(f"vLLM's /v1/models is no list of models: {error!r}") from error
