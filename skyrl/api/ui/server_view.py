"""What the status page shows of the server itself to a key with the scope admin: parts, queues, adapters, disk.

Counts only: nothing in it belongs to one tenant. Everything but the quotas' counts comes from the database, so that any
API process gives the same answer.
"""

from __future__ import annotations

import asyncio
import math
import re
import shutil
import time
from collections import Counter, defaultdict
from typing import Any

import msgspec

from skyrl.api.access import Caller
from skyrl.api.served import ServedModel
from skyrl.api.services import Services
from skyrl.api.ui.overview import Overview
from skyrl.base.types.activity import EngineActivity, WaitsFor
from skyrl.runtime.metrics.files import MetricsDirectory
from skyrl.storage.db import processes as api_processes
from skyrl.storage.db.quotas import servable
from skyrl.storage.db.runs import pending_by_kind

_VLLM_NAMES = {
    "kv_cache_usage_perc": "kv_use",
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
}
_VLLM = re.compile(rf'^vllm:({"|".join(_VLLM_NAMES)})\{{.*?replica="(\d+)".*?\}} (\S+)$', re.M)
_WAITS = re.compile(
    r'^vllm:skyrl_(requests_waiting|waiting_bound)\{(?=.*?reason="(\w+)")(?=.*?replica="(\d+)").*?\} (\S+)$', re.M
)
_HELD_BACK = re.compile(r"^skyrl_samples_held_back\{.*\} (\S+)$", re.M)
_SENTENCES = {
    "cache": "for room in the key-value cache, {bound} tokens, which also keeps some for the answers that run",
    "seats": "for an end among {bound} running requests (max_num_seqs)",
    "tokens": "for a later step: one computes {bound} tokens (max_num_batched_tokens)",
    "adapters": "for a step of other adapters: one has {bound} (max_loras)",
    "turn": "for answers of other tenants: a tenant's long prompts take at most every other second from them",
    "other": "for a grammar that is compiled, or for weights",
}
"""What requests wait for in vLLM: what the reasons of its plugin mean, each with its bound."""


def why_waiting(metrics: str) -> dict[int, list[str]]:
    """For each inference server, by its number, a sentence for each reason for which requests wait in it. `metrics` are
    those that skyrl publishes; engines of one server count together."""
    waits, bounds = defaultdict[int, Counter[str]](Counter), defaultdict[int, Counter[str]](Counter)
    for name, reason, replica, value in _WAITS.findall(metrics):
        (waits if name == "requests_waiting" else bounds)[int(replica)][reason] += int(float(value))
    return {
        replica: [
            f"{count} {'waits' if count == 1 else 'wait'} {sentence.format(bound=f'{bounds[replica][reason]:,}')}"
            for reason, sentence in _SENTENCES.items()
            if (count := counts[reason])
        ]
        for replica, counts in waits.items()
    }


COUNT_S = 10.0
"""How long the number of servable adapters is kept, because counting reads all open sampling sessions. The metric of
the same name is counted as often."""


class ServerView:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._servable, self._counted_at = list[int](), -math.inf
        """By base model, and when they were counted (monotonic seconds)."""

    async def shown_to(self, caller: Caller) -> dict[str, Any]:
        """Times are in seconds since the epoch, `_s` are seconds. Holds no ages, so that an unchanged box stays equal.

        What belongs to a base model is in `base_models` if there are several, each with its name first."""
        services = self._services
        served = services.served
        server = await Overview(services, caller).server()
        pending, processes = await services.database.read_async(
            lambda c: (pending_by_kind(c), api_processes.heartbeats(c))
        )
        parts = [
            _base_model(model, number, await asyncio.to_thread(_vllm, services.published_metrics, model))
            for model, number in zip(served, await self._count_servable(), strict=True)
        ]
        names = server.get("base_models", [])
        used = shutil.disk_usage(services.config.state_dir)
        several = {"base_models": [name | part for name, part in zip(names, parts, strict=True)]} if names else parts[0]
        return {
            "server": server,
            **several,
            "api_processes": [
                # A process that is alone on its database may write no heartbeats.
                {"id": name, "started_at": started_at, "heartbeat_at": heartbeat_at if len(processes) > 1 else None}
                for name, started_at, heartbeat_at in processes
            ],
            "pending": pending,
            "held_back": await asyncio.to_thread(held_back, services.published_metrics),
            "quotas": services.quotas.counts(),
            "disk": {"free_bytes": used.free, "total_bytes": used.total},
            "database_bytes": await asyncio.to_thread(services.database.size),
        }

    async def _count_servable(self) -> list[int]:
        if (now := time.monotonic()) >= self._counted_at + COUNT_S:
            scopes = [model.config.role.own for model in self._services.served]
            self._servable = await self._services.database.read_async(lambda c: [servable(c, own) for own in scopes])
            self._counted_at = now
        return self._servable


def held_back(published: MetricsDirectory) -> int:
    """The samples and OpenAI requests that wait in all API processes to be sent to the inference servers."""
    return sum(int(float(value)) for value in _HELD_BACK.findall(published.read()))


def _base_model(model: ServedModel, adapters: int, vllm: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts of one base model. `adapters` is how many of them can be sampled from."""
    state, activity = model.watch.state, model.watch.activity
    return {
        "trainer": _trainer(model),
        "inference": {
            "published": state.inference_proxy_url is not None,
            "generation": state.generation,
            "away_since": activity.inference_away_since,
        },
        "models": _models(activity),
        "adapters": {"servable": adapters, "places": model.sampling.places},
        "vllm": vllm,
    }


def _vllm(published: MetricsDirectory, model: ServedModel) -> list[dict[str, Any]]:
    """Each inference server that skyrl runs, by its number: the part of its key-value cache in use (0 to 1), its
    requests that run and wait, and why they wait. Published every few seconds."""
    role, engines = model.config.role, range(model.config.backend_config.inference.num_engines)
    names = [f"{role.process('vllm')}-{number}" for number in engines] if role.name else None
    text = published.read(names)
    why, found = why_waiting(text), dict[int, dict[str, Any]]()
    for name, replica, value in _VLLM.findall(text):
        numbers = found.setdefault(int(replica), {"replica": int(replica), "why": why.get(int(replica), [])})
        numbers[_VLLM_NAMES[name]] = float(value)
    return [found[replica] for replica in sorted(found)]


def _trainer(model: ServedModel) -> dict[str, Any] | None:
    """None for a base model that nobody trains, and on a gateway on whose database nobody trains it."""
    watch, activity = model.watch, model.watch.activity
    heartbeat_at = watch.state.heartbeat_at or None
    if not model.config.modes.trains and (
        heartbeat_at is None or (model.config.role.name and not watch.state.activity)
    ):
        return None  # one of several has a row without an engine, too, but then nothing that an engine does
    recovery = activity.recovery
    return {
        "trouble": watch.training_trouble(),
        "heartbeat_at": heartbeat_at,
        "recovery": None if recovery is None else msgspec.structs.asdict(recovery),
        "run_s": activity.run_s,
    }


def _models(activity: EngineActivity) -> dict[str, Any]:
    """The models with commands: how many wait for what, and since when the longest has waited."""
    waiting = [model for model in activity.models.values() if model.waits_for is not WaitsFor.NOTHING]
    return {
        "running": len(activity.models) - len(waiting),
        "waiting": dict(Counter(str(model.waits_for) for model in waiting)),
        "longest_wait_since": min((model.since for model in waiting), default=None),
        "commands_waiting": sum(model.waiting for model in activity.models.values()),
    }
