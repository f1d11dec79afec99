"""What the sidecar must know about its vLLM: the model, its context, the version of its weights; and how vLLM was
started, as fields of SGLang's `/server_info`. Clients read the sizes before they use a server."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from skyrl.base.types.weights import FIRST_VERSION
from skyrl.inference.sidecar.errors import BadRequest, NotOffered, SidecarError, VllmBroke
from skyrl.inference.sidecar.vllm import Vllm

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """`model` is the served name of the base model, `root` where its files are. With `dev_mode`, vLLM can abort single
    requests, and its answers to them hold what was sampled."""

    model: str
    root: str
    context: int
    dev_mode: bool


class KnownFacts:
    """Asks vLLM once, and again after `forget`."""

    def __init__(self, vllm: Vllm) -> None:
        self._vllm = vllm
        self._asking = asyncio.Lock()
        self._known: Facts | None = None

    def forget(self) -> None:
        """vLLM was away: the next one may be another."""
        self._known = None

    async def get(self) -> Facts:
        """Raises SidecarError."""
        if self._known is None:
            async with self._asking:
                if self._known is None:
                    self._known = await self._ask()
        return self._known

    async def _ask(self) -> Facts:
        answer = await self._vllm.call("GET", "/v1/models")
        models = answer.get("data") if isinstance(answer, dict) else None
        bases = [one for one in models if isinstance(one, dict) and not one.get("parent")] if models else []
        base = bases[0] if bases else None
        if base is None or type(base.get("max_model_len")) is not int:
            raise VllmBroke("vLLM's /v1/models names no base model with a max_model_len")
        return Facts(
            model=str(base.get("id")),
            root=str(base.get("root") or base.get("id")),
            context=base["max_model_len"],
            dev_mode=await is_paused(self._vllm) is not None,
        )


async def is_paused(vllm: Vllm) -> bool | None:
    """None if vLLM does not say, because it was started without its development endpoints. Raises SidecarError."""
    try:
        answer = await vllm.call("GET", "/is_paused")
    except NotOffered:
        return None
    return isinstance(answer, dict) and answer.get("is_paused") is True


class WeightVersion:
    """The version of vLLM's weights. Calls that come while vLLM is asked share the next question: its answer must not
    be older than the call."""

    def __init__(self, vllm: Vllm) -> None:
        self._vllm = vllm
        self._asking = asyncio.Lock()
        self._calls = 0
        self._answered = 0
        self._answer: str | None = None

    async def get(self) -> str | None:
        """None if vLLM did not answer: the version is then unknown."""
        self._calls += 1
        call = self._calls
        async with self._asking:
            if self._answered < call:
                answered = self._calls
                self._answer = await self._ask()
                self._answered = answered
            return self._answer

    async def at_end(self, spans: list[dict[str, Any]] | None) -> str | None:
        """The version at the end of a sample whose tokens have these; without them, the version now."""
        return spans[-1]["version"] if spans else await self.get()

    async def _ask(self) -> str | None:
        try:
            answer = await self._vllm.call("GET", "/weight_info")
        except NotOffered:
            return FIRST_VERSION  # there is also no way to set another
        except SidecarError as error:
            logger.warning("the version of the weights is unknown: %s", error)
            return None
        version = answer.get("weight_version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else None


TIMEOUT_S = 25.0
"""vLLM looks at its whole machine for the first answer, which takes seconds. Clients wait 30 s."""


class KnownConfig:
    """Asks vLLM once."""

    def __init__(self, vllm: Vllm) -> None:
        self._vllm = vllm
        self._asking = asyncio.Lock()
        self._known: dict[str, Any] | None = None

    async def device(self) -> str | None:
        """Such as `cuda` or `cpu`; None if vLLM does not tell. Raises VllmAway."""
        return _part(await self._config(), "device_config").get("device")

    async def only_text(self) -> bool:
        """Whether vLLM was started without its vision tower; False if vLLM does not tell. Raises VllmAway."""
        pictures = _part(_part(await self._config(), "model_config"), "multimodal_config")
        return pictures.get("language_model_only") is True

    async def get(self) -> dict[str, Any]:
        """SGLang's fields; empty if vLLM does not tell. Raises VllmAway."""
        return _fields(await self._config())

    async def _config(self) -> dict[str, Any]:
        async with self._asking:
            if self._known is None:
                try:
                    answer = await self._vllm.call("GET", "/server_info?config_format=json", timeout_s=TIMEOUT_S)
                except (NotOffered, VllmBroke, BadRequest):
                    return {}
                self._known = _part(answer, "vllm_config")
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
