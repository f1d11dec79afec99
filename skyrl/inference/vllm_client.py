"""Control of one vLLM server: health, adapters, sleep, warm-up, metrics.

Knows vLLM's control endpoints and how they answer, also the route that loads an adapter, which the forwarding client
calls with an HTTP client of its own. Sends no samples: httpx gets slow above some 64 concurrent requests, which control
calls never reach. `VllmMetrics` publishes the metrics of several servers beside those of skyrl's own processes.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import httpx

from skyrl.inference.metrics import shown
from skyrl.inference.remote.hand_over import SEND_FILES, AdapterMessage
from skyrl.inference.remote.references import NOT_STORED, STORE_AWAY
from skyrl.inference.vllm_plugin.protocol import INCARNATION
from skyrl.runtime.metrics.files import MetricsDirectory
from skyrl.runtime.processes.runtime import Runtime

Probe = Literal["/health", "/is_sleeping", "/statusz"]
"""vLLM's API server answers `/health` by itself. For `/is_sleeping` it asks the engine core, which answers between two
of its steps. `/statusz` is the router's."""


class ProbeResult(Enum):
    """The result of one probe of a server."""

    ANSWERED = "the server answered"
    UNANSWERED = "the server accepts connections, but sent no answer in time, a 503 (dead engine core), or garbage"
    REFUSED = "the server refuses or breaks connections: it is starting or ending"


@dataclass(frozen=True, slots=True)
class Health:
    """A server that answers `/health` with 200. `incarnation` is None if the server does not send it."""

    incarnation: str | None


class VllmError(RuntimeError):
    """vLLM answered with an error; `status` is the HTTP status, the message is vLLM's."""

    def __init__(self, action: str, status: int, message: str) -> None:
        super().__init__(f"vLLM could not {action}: {status} {message}")
        self.status = status


class VllmClient:
    """One server. Transport errors are raised as httpx.TransportError. `timeout_s` bounds each part of an answer."""

    def __init__(self, url: str, api_key: str, *, timeout_s: float = 60.0) -> None:
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            trust_env=False,  # no proxy: the server is on loopback
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def health(self) -> Health | None:
        """None when the server or its engine core is dead, or does not answer in time."""
        try:
            response = await self._http.get("/health")
        except httpx.RequestError:  # also an answer that cannot be decoded
            return None
        return Health(response.headers.get(INCARNATION)) if response.status_code == httpx.codes.OK else None

    async def probe(self, probe: Probe, within_s: float) -> ProbeResult:
        """Probe the server, which has `within_s` seconds for each part of its answer."""
        try:
            response = await self._http.get(probe, timeout=within_s)
        except httpx.TimeoutException:
            return ProbeResult.UNANSWERED
        except httpx.TransportError:
            return ProbeResult.REFUSED
        except httpx.RequestError:  # an answer that cannot be decoded, or that redirects in circles
            return ProbeResult.UNANSWERED
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return ProbeResult.UNANSWERED
        return ProbeResult.ANSWERED

    async def metrics(self, within_s: float) -> str:
        """The text of `/metrics`. Raises VllmError and httpx.TransportError."""
        response = await self._http.get("/metrics", timeout=within_s)
        self._check(response, "show its metrics")
        return response.text

    async def load_adapter(self, name: str, directory: str, files: Path | None = None) -> None:
        """Register an adapter directory. Succeeds if the name is loaded already: names are never reused. With `files`
        the request has the files of this local directory with it, and `directory` is their reference.

        Raises VllmError: no such directory, unreadable files, a rank above the server's. Raises OSError: no `files`.
        """
        request = load_request(name, directory)
        response = await self._http.post(PATH, json=request if files is None else {**request, "held": str(files)})
        if files is not None and response.status_code == SEND_FILES:
            with AdapterMessage(request, files) as message:
                response = await self._http.post(PATH, content=message.pieces(), headers=message.headers)
        if not is_loaded(response.status_code, response.content):
            self._check(response, f"load adapter {name!r}")

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Succeeds if the name is unknown. Requests that run with the adapter finish."""
        response = await self._http.post("/v1/unload_lora_adapter", json={"lora_name": name})
        if response.status_code != httpx.codes.NOT_FOUND:
            self._check(response, f"unload adapter {name!r}")

    async def sleep(self) -> None:
        """Free the device memory. The weights stay in the host's memory; running requests are aborted."""
        self._check(await self._http.post("/sleep", params={"level": 1}), "sleep")

    async def wake(self) -> None:
        """Take the device memory again."""
        self._check(await self._http.post("/wake_up"), "wake up")

    async def is_sleeping(self) -> bool:
        """Whether the server sleeps or is paused. Always False for a server without development endpoints."""
        response = await self._http.get("/is_sleeping")
        if response.status_code == httpx.codes.NOT_FOUND:
            return False
        self._check(response, "say whether it sleeps")
        return response.json()["is_sleeping"]

    async def warm_up(self) -> None:
        """Generate 2 tokens on each path that vLLM initializes lazily, so that no user's first sample waits for it (2 s
        on a CPU)."""
        await self._complete({})
        await self._complete({"n": 2, "logprobs": 1})
        await self._complete({"seed": 1})
        await self._complete({"prompt_logprobs": 1})

    async def prompt_logprobs(self, model: str, tokens: list[int]) -> list[float]:
        """The logprob of each token but the first, given those before it, by a base model or adapter of this name."""
        body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        response = await self._http.post("/v1/completions", json=body)
        self._check(response, "score a prompt")
        rows = response.json()["choices"][0]["prompt_logprobs"]
        return [row[str(token)]["logprob"] for row, token in zip(rows[1:], tokens[1:], strict=True)]

    async def logprobs_behind(self, model: str, tokens: list[int], picture: bytes, count: int) -> list[float]:
        """The logprobs of the last `count` tokens of a prompt with a picture, a PNG. In `tokens` one token stands for
        the picture."""
        address = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        body = {
            "model": model,
            "token_ids": tokens,
            "content_parts": [{"type": "image_url", "url": address}],
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        }
        response = await self._http.post("/inference/v1/generate", json=body)
        self._check(response, "score a prompt with a picture")
        rows = response.json()["prompt_logprobs"]
        return [row[str(token)]["logprob"] for row, token in zip(rows[-count:], tokens[-count:], strict=True)]

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


PATH = "/v1/load_lora_adapter"


def load_request(name: str, directory: str) -> dict[str, str]:
    """The request body, to be sent as JSON. `directory` is the adapter's directory as vLLM sees it, or a reference
    to the checkpoint store (`skyrl.inference.remote`)."""
    return {"lora_name": name, "lora_path": directory}


def is_loaded(status: int, answer: bytes) -> bool:
    """Whether the server has the adapter loaded now. If it has loaded the name before, it has the same weights: names
    are never reused."""
    return status == 200 or (status == 400 and b"already been loaded" in answer)


def is_missing(status: int, answer: bytes) -> bool:
    """Whether the checkpoint store does not have the adapter to which a request referred."""
    return status == 404 and NOT_STORED.encode() in answer


def is_to_repeat(status: int, answer: bytes) -> bool:
    """Whether the load may succeed later: the replica's node cannot read the checkpoint store now, or the router in
    front of the replicas got no answer from one of them."""
    return status in (502, 504) or (status == 503 and STORE_AWAY.encode() in answer)


logger = logging.getLogger(__name__)

PERIOD_S = 5.0
TIMEOUT_S = 3.0


class VllmMetrics:
    """Of the vLLMs of `runtime` at `urls`, numbered from `first` on. A vLLM that does not answer is left out, once its
    last metrics are old."""

    def __init__(self, runtime: Runtime, urls: Sequence[str], directory: MetricsDirectory, first: int = 0) -> None:
        self._role, key = runtime.config.role, runtime.inference_api_key or ""
        self._clients = {number: VllmClient(url, key) for number, url in enumerate(urls, first)}
        self._directory = directory

    async def run(self) -> None:
        """Read and publish until cancelled."""
        try:
            while True:
                await asyncio.gather(*map(self.publish, self._clients))
                await asyncio.sleep(PERIOD_S)
        finally:
            await asyncio.gather(*(client.close() for client in self._clients.values()))

    async def publish(self, number: int) -> None:
        """Publish one replica's metrics. A failure is only logged: the watch over vLLM says more."""
        try:
            text = await self._clients[number].metrics(TIMEOUT_S)
            await asyncio.to_thread(self._write, number, text)
        except (httpx.RequestError, VllmError, OSError, ValueError) as error:
            logger.debug("replica %d shows no metrics: %s", number, error)

    def _write(self, number: int, text: str) -> None:
        self._directory.write(f"{self._role.process('vllm')}-{number}", shown(text, number, self._role.labels))
