"""A whole API process for tests: HTTP, SQLite, and the requests of its clients. `conftest` starts the process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, cast

import httpx
import numpy as np
from engine_harness import until
from prometheus_client.parser import text_string_to_metric_families

from skyrl.api.services import Services
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.runtime.metrics.files import MetricsWriter
from skyrl.storage.db.usage import UsageCounter

BASE = "acme/base"
SAMPLE = {"X-Tinker-Request-Type": "Sample", "Accept": "application/x-protobuf"}
LONG_S = 60.0


@dataclass
class Api:
    """One running API process, and a client of this process."""

    services: Services
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.http.post(f"/api/v1/{path}", json=body, headers=headers)

    async def sampler(self, *, base_model: str = BASE, **headers: str) -> str:
        """Create a session and, in it, a sampling session on the base model."""
        session = (await self.post("create_session", {}, **headers)).json()["session_id"]
        wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base_model}
        return (await self.post("create_sampling_session", wanted, **headers)).json()["sampling_session_id"]

    async def sample(self, sampler: str, seq_id: int, **changes: Any) -> dict[str, Any]:
        answer = await self.post("asample", sample_body(sampler, seq_id, **changes))
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def result(self, request_id: str, **headers: str) -> httpx.Response:
        return await self.post("retrieve_future", {"request_id": request_id}, **(SAMPLE | headers))

    @property
    def usage(self) -> UsageCounter:
        """Counts what the samples of the process have used."""
        return cast(Any, self.services.served[0].sampling.gate.count).__self__

    async def finish(self, sampler: str) -> httpx.Response:
        return await self.post(f"sessions/{session_of(sampler)}/finish", {})


def session_of(sampler: str) -> str:
    return sampler.partition(":")[0]


def sample_body(
    sampler: str, seq_id: int | None, *, prompt: list[int] | dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    text = {"chunks": [{"type": "encoded_text", "tokens": prompt or [5, 6, 7]}]}
    params = {"max_tokens": 3}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": prompt if isinstance(prompt, dict) else text,
        "sampling_params": params,
    } | changes


def tokens(answer: httpx.Response) -> list[list[int]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-protobuf", answer.text
    return [np.frombuffer(s.tokens, np.int32).tolist() for s in pb.SampleResponse.FromString(answer.content).sequences]


Serve = Callable[..., AbstractAsyncContextManager[Api]]
"""Starts an API process with these options. A second start after the end of the first is a restart."""


async def scrape(api: Api) -> dict[str, float]:
    """What the process shows of itself now, by series without its own label."""
    metrics = api.services.metrics
    await until(lambda: api.services.published_metrics.prepared is not None)
    MetricsWriter(api.services.published_metrics, "api-0", metrics.registry, more=metrics.labelled).write()
    api.services.published_metrics.prepare()
    answer = await api.http.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels.pop("process") == "api-0"
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found
