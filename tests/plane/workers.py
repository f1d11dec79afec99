"""The sidecars of a plane, as a trainer of an RL framework talks to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from skyrl.runtime.processes.ports import free_port
from tests.plane.trainer import usual_group

RUNNING = "vllm:num_requests_running{"
BEGUN_S = 60.0


@dataclass(frozen=True)
class Worker:
    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json={} if body is None else body) as answer:
            return answer.status, await answer.json(content_type=None)

    async def done(self, path: str, body: Any = None) -> Any:
        status, answer = await self.post(path, body)
        assert status == 200, (path, answer)
        assert not isinstance(answer, dict) or answer.get("success") is not False, answer
        return answer

    async def refused(self, path: str, body: Any = None, status: int = 400) -> str:
        found, answer = await self.post(path, body)
        assert found == status, answer
        assert answer["success"] is False
        return answer["message"]

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as answer:
            return answer.status, await answer.text()

    async def sample(self, tokens: Sequence[int], new_tokens: int, **body: Any) -> dict[str, Any]:
        """Greedy, of exactly this length."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        asked = {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True} | body
        return await self.done("/generate", asked)

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Of each token but the first."""
        scored = await self.sample(tokens, 0, logprob_start_len=0)
        return [triple[0] for triple in scored["meta_info"]["input_token_logprobs"][1:]]

    async def version(self) -> str:
        return (await self.done("/model_info"))["weight_version"]

    async def checksum(self) -> str:
        payload = (await self.done("/weights_checker", {"action": "checksum"}))["payload"]
        assert payload[0]["parallelism_info"]["tp_rank"] == 0
        return payload[0]["per_gpu_checksum"]

    async def running(self) -> int:
        _, load = await self.post("/v1/loads")
        return load["loads"][0]["num_running_reqs"]

    async def load_from(self, directory: Path, version: str, **fields: Any) -> Any:
        body = {"model_path": str(directory), "weight_version": version} | fields
        return await self.done("/update_weights_from_disk", body)

    async def computing(self) -> float:
        """Samples that vLLM has begun."""
        _, text = await self.get("/metrics")
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(RUNNING))


Sample = Callable[[Worker], Coroutine[Any, Any, dict[str, Any]]]
Begin = Callable[[], list[asyncio.Task[Any]]]


ENDLESS = 3_500
"""Tokens of a sample that some calls must find unfinished. A shorter one may end before, where the machine stands still
for seconds."""


async def until_computing(workers: Sequence[Worker], samples: int) -> None:
    """Wait until each worker's vLLM has begun to compute this number. Raises TimeoutError: they may have ended
    before."""
    async with asyncio.timeout(BEGUN_S):
        for worker in workers:
            while await worker.computing() < samples:  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(0.01)


async def all_computed(workers: Sequence[Worker], begin: Begin) -> list[asyncio.Task[Any]]:
    """Requests that the workers' vLLMs compute at the same time, as many each. They are begun again if one has ended
    before all have begun, as happens on a busy machine."""
    while True:
        tasks = begin()
        for worker in workers:
            each = len(tasks) // len(workers)
            while not any(task.done() for task in tasks) and await worker.computing() < each:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        if not any(task.done() for task in tasks):
            return tasks
        await asyncio.gather(*tasks)


async def all_paused(workers: Sequence[Worker], begin: Begin, mode: str) -> list[asyncio.Task[Any]]:
    """Requests that the workers computed when they were paused. They are begun again if one had ended."""
    while True:
        tasks = await all_computed(workers, begin)
        await asyncio.gather(*(worker.done("/pause_generation", {"mode": mode}) for worker in workers))
        if {await worker.running() for worker in workers} == {len(tasks) // len(workers)}:
            return tasks
        await asyncio.gather(*(worker.done("/continue_generation") for worker in workers))
        await asyncio.gather(*tasks)


def _begin(workers: Sequence[Worker], samples: int, sample: Sample) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(sample(worker)) for worker in workers for _ in range(samples)]


async def computed(workers: Sequence[Worker], samples: int, sample: Sample) -> list[asyncio.Task[dict[str, Any]]]:
    """`all_computed` for this number of samples of each worker."""
    return await all_computed(workers, lambda: _begin(workers, samples, sample))


async def paused_amid(
    workers: Sequence[Worker], samples: int, sample: Sample, mode: str
) -> list[asyncio.Task[dict[str, Any]]]:
    """`all_paused` for this number of samples of each worker."""
    return await all_paused(workers, lambda: _begin(workers, samples, sample), mode)


class TrainerGroup:
    """The trainer's side of a group with `workers`."""

    def __init__(self, group: Any, workers: Sequence[Worker], name: str) -> None:
        self.name = name
        self._group = group
        self._workers = workers

    async def bucket(
        self, tensors: dict[str, torch.Tensor], version: str | None, **fields: Any
    ) -> list[tuple[int, Any]]:
        """Broadcast while each worker is told what comes, as one framework does. The workers' answers."""
        body = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": self.name,
            "flush_cache": False,
            "weight_version": version,
        } | fields
        telling = [asyncio.create_task(w.post("/update_weights_from_distributed", body)) for w in self._workers]
        await asyncio.to_thread(self._broadcast, list(tensors.values()))
        return await asyncio.gather(*telling)

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.contiguous(), 0, group=self._group)


@contextlib.asynccontextmanager
async def trainer_group(
    workers: Sequence[Worker], name: str, members: int | None = None, **fields: Any
) -> AsyncIterator[TrainerGroup]:
    """`members` of the group, if one of `workers` stands for several."""
    port, world = free_port(), members or 1 + len(workers)
    telling = [
        asyncio.create_task(
            worker.done(
                "/init_weights_update_group",
                {
                    "master_address": "127.0.0.1",
                    "master_port": port,
                    "rank_offset": 1 + number,
                    "world_size": world,
                    "group_name": name,
                    "backend": "gloo",
                }
                | fields,
            )
        )
        for number, worker in enumerate(workers)
    ]
    group = await asyncio.to_thread(usual_group, port, world, name)
    await asyncio.gather(*telling)
    try:
        yield TrainerGroup(group, workers, name)
    finally:
        for worker in workers:
            await worker.post("/destroy_weights_update_group", {"group_name": name})
        dist.destroy_process_group(group)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def in_buckets(tensors: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    names = list(tensors)
    return [{name: tensors[name] for name in names[start : start + size]} for start in range(0, len(names), size)]
