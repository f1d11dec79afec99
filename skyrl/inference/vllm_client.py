"""Control of one vLLM server: health, adapters, pause, sleep, warm-up.

Knows vLLM's control endpoints and how they answer. Deliberately not the way samples go: httpx degrades above some
64 concurrent requests, which control calls never reach. Knows nothing of other replicas or of who asks.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, Literal

import httpx

WARM_UP_ADAPTER = "skyrl-warm-up"

Probe = Literal["/health", "/is_sleeping"]
"""The API server answers the first by itself; for the second it asks the engine core, which answers between steps."""


class Pulse(Enum):
    """How a server takes a probe."""

    WELL = "answers"
    SILENT = "takes connections and gives no good answer in time: none, one that its engine is dead, or garbage"
    DEAF = "takes no connection (not yet, not any more), or breaks off: it starts, or it ends"


class VllmError(RuntimeError):
    """vLLM answered with an error; `status` is the HTTP status, the message is vLLM's."""

    def __init__(self, action: str, status: int, message: str) -> None:
        super().__init__(f"vLLM could not {action}: {status} {message}")
        self.status = status


class VllmClient:
    """One server. Transport errors are raised as httpx.TransportError."""

    def __init__(self, url: str, api_key: str, *, timeout_s: float = 60.0, health_timeout_s: float = 5.0) -> None:
        self.url = url
        self._health_timeout_s = health_timeout_s
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            trust_env=False,  # a proxy for the internet is no way to a server on loopback
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def health(self) -> bool:
        """Whether the server and its engine are alive; False also when nothing answers in time."""
        try:
            response = await self._http.get("/health", timeout=self._health_timeout_s)
        except httpx.RequestError:  # also an answer that cannot be decoded
            return False
        return response.status_code == httpx.codes.OK

    async def pulse(self, probe: Probe, within_s: float) -> Pulse:
        try:
            response = await self._http.get(probe, timeout=within_s)
        except httpx.TimeoutException:
            return Pulse.SILENT
        except httpx.TransportError:
            return Pulse.DEAF
        except httpx.RequestError:  # an answer that cannot be decoded, or that sends in circles
            return Pulse.SILENT
        return Pulse.SILENT if response.status_code == httpx.codes.SERVICE_UNAVAILABLE else Pulse.WELL

    async def models(self) -> list[str]:
        """Names of the base model and of every registered adapter."""
        response = await self._http.get("/v1/models")
        self._check(response, "list models")
        return [model["id"] for model in response.json()["data"]]

    async def load_adapter(self, name: str, path: Path) -> None:
        """Register an adapter directory. A name that is already loaded is success: names are never reused.

        Raises VllmError: no such directory, unreadable files, a rank above the server's.
        """
        body = {"lora_name": name, "lora_path": str(path)}
        response = await self._http.post("/v1/load_lora_adapter", json=body)
        if response.status_code == httpx.codes.BAD_REQUEST and "already been loaded" in response.text:
            return
        self._check(response, f"load adapter {name!r}")

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; an unknown name is success. Requests that run with it finish."""
        response = await self._http.post("/v1/unload_lora_adapter", json={"lora_name": name})
        if response.status_code != httpx.codes.NOT_FOUND:
            self._check(response, f"unload adapter {name!r}")

    async def pause(self, mode: Literal["abort", "wait", "keep"] = "keep") -> None:
        """Stop generating: `keep` freezes what runs until `resume`, `abort` ends it, `wait` lets it finish."""
        self._check(await self._http.post("/pause", params={"mode": mode}), "pause")

    async def resume(self) -> None:
        self._check(await self._http.post("/resume"), "resume")

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give device memory back (1 keeps weights in host memory, 2 drops them); running work is aborted."""
        self._check(await self._http.post("/sleep", params={"level": level}), "sleep")

    async def wake(self, *tags: Literal["weights", "kv_cache"]) -> None:
        """Take the memory again; everything unless `tags` names a part."""
        self._check(await self._http.post("/wake_up", params={"tags": list(tags)}), "wake up")

    async def is_sleeping(self) -> bool:
        """Whether it was put to sleep or paused, and nobody has woken it since. A server without development endpoints
        cannot be."""
        response = await self._http.get("/is_sleeping")
        if response.status_code == httpx.codes.NOT_FOUND:
            return False
        self._check(response, "say whether it sleeps")
        return response.json()["is_sleeping"]

    async def warm_up(self, adapter: Path | None = None) -> None:
        """Touch each lazy path with 2 tokens, so that no user's first sample pays for it (2 s on a CPU)."""
        await self._complete({})
        await self._complete({"n": 2, "logprobs": 1})
        await self._complete({"seed": 1})
        await self._complete({"prompt_logprobs": 1})
        if adapter is not None:
            await self.load_adapter(WARM_UP_ADAPTER, adapter)
            await self._complete({"model": WARM_UP_ADAPTER})
            await self.unload_adapter(WARM_UP_ADAPTER)

    async def _complete(self, extra: dict[str, Any]) -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True, "return_token_ids": True} | extra
        self._check(await self._http.post("/v1/completions", json=body), "generate")

    @staticmethod
    def _check(response: httpx.Response, action: str) -> None:
        if response.is_success:
            return
        message = response.text[:500]
        if response.headers.get("content-type", "").startswith("application/json"):
            error = response.json().get("error")
            message = error["message"] if isinstance(error, dict) else str(error)
        raise VllmError(action, response.status_code, message)
