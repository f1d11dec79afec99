"""A vLLM whose model is three tensors: the worker extension's own calls change them. Samples run until `end` is set."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from weight_model import EMBED, TinyModel, served, tensors

from skyrl.inference.vllm_plugin.weights.receiver import Receiver
from skyrl.weights.segments import Segment, places_of
from tests.component.router_world import Exchange, until
from tests.component.sidecar_world import FakeVllm, RunningSidecar, answers, choice, completion

Part = dict[str, torch.Tensor]
GROUP, TENSOR, DISK = "/update_weights_from_distributed", "/update_weights_from_tensor", "/update_weights_from_disk"


class SentGroup:
    """A group whose trainer has sent `sent`."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def broadcast_each(self, tensors: Iterable[torch.Tensor]) -> Generator[torch.Tensor]:
        for room in tensors:
            yield room.copy_(self.sent.pop(0))

    def close(self) -> None:
        pass


class UpdatedVllm(FakeVllm):
    """`flushed` has how the cache was flushed, each time."""

    def __init__(self, directory: Path) -> None:
        super().__init__(self._sample)
        self.end = asyncio.Event()
        self.group = SentGroup()
        self.flushed: list[str] = []
        self.model = TinyModel()
        whole = served(self.model, directory)
        self.receiver = Receiver(whole, lambda **_: self.group, torch.device("cpu"), {"tp_rank": 0}, 0, lambda: None)
        done = answers({"status": "ok", "success": True})
        for path in ("/pause?mode=keep&clear_cache=false", "/pause?mode=abort&clear_cache=false", "/resume"):
            self.answer[path] = done
        self.answer["/server_info?config_format=json"] = answers({"vllm_config": {}})
        for path in ("/reset_prefix_cache", "/reset_prefix_cache?reset_running_requests=true"):
            self.answer[path] = self._flush
        self.answer |= {"/collective_rpc": self._call, "/update_weight_version": self._name}

    @property
    def first(self) -> float:
        """An element of the model."""
        return self.model.embed_tokens.weight.detach()[0, 0].item()

    async def _sample(self, exchange: Exchange) -> None:
        await self.end.wait()
        await answers(completion(choice([8])))(exchange)

    async def _flush(self, exchange: Exchange) -> None:
        self.flushed.append(exchange.request.path.partition("?")[2])
        await answers({"success": True})(exchange)

    async def _call(self, exchange: Exchange) -> None:
        name, arguments = json.loads(exchange.request.body)["args"]
        await answers({"results": [self.receiver.answer(name, arguments)]})(exchange)

    async def _name(self, exchange: Exchange) -> None:
        self.version = json.loads(exchange.request.body)["new_version"]
        await answers({})(exchange)


def part_of(value: float, *, last: bool | None = None) -> Part:
    """The tensors of a version, or only its last one, or only those before."""
    whole = tensors(value)
    if last is None:
        return whole
    return {name: tensor for name, tensor in whole.items() if (name == EMBED) is last}


def described(part: Part) -> dict[str, Any]:
    return {
        "names": list(part),
        "dtypes": ["float32" for _ in part],
        "shapes": [list(tensor.shape) for tensor in part.values()],
    }


class Trainer:
    """Sends weights to one sidecar by one of the media: `disk`, `group` or `memory`. `fields` go with each call."""

    def __init__(self, medium: str, sidecar: RunningSidecar, vllm: UpdatedVllm, directory: Path) -> None:
        self._medium = medium
        self._sidecar = sidecar
        self._vllm = vllm
        self._directory = directory
        self._joined = False

    async def stage(self, value: float, **fields: Any) -> None:
        """All but the end of an update."""
        match self._medium:
            case "disk":
                self._directory.mkdir(exist_ok=True)
                save_file(part_of(value), self._directory / "model.safetensors")
                status, answer = await self._from_disk(stage_only=True, **fields)
            case "group":
                await self._join()
                status, answer = await self._bucket(part_of(value, last=False), **fields)
            case _:
                status, answer = await self._map(part_of(value), **fields)
        assert (status, answer["applied"]) == (200, False), answer

    async def apply(self, value: float, **fields: Any) -> tuple[int, Any]:
        """What makes the update the model."""
        match self._medium:
            case "disk":
                return await self._from_disk(**fields)
            case "group":
                return await self._bucket(part_of(value, last=True), **fields)
            case _:
                return await self._sidecar.post(TENSOR, {"memory": None} | fields)

    async def update(self, value: float, **fields: Any) -> tuple[int, Any]:
        await self.stage(value, **fields)
        return await self.apply(value, **fields)

    async def _from_disk(self, **fields: Any) -> tuple[int, Any]:
        return await self._sidecar.post(DISK, {"model_path": str(self._directory)} | fields)

    async def _join(self) -> None:
        if not self._joined:
            group = {"master_address": "here", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
            assert (await self._sidecar.post("/init_weights_update_group", group))[0] == 200
            self._joined = True

    async def _bucket(self, part: Part, **fields: Any) -> tuple[int, Any]:
        self._vllm.group.sent += part.values()
        return await self._sidecar.post(GROUP, described(part) | fields)

    async def _map(self, part: Part, **fields: Any) -> tuple[int, Any]:
        places, size = places_of(part, None)
        self._segment = Segment(size, torch.device("cpu"))
        self._segment.fill(part, places, None)
        body = described(part) | {"places": places, "memory": self._segment.described(), "stage_only": True}
        return await self._sidecar.post(TENSOR, body | fields)


async def in_flight(sidecar: RunningSidecar, vllm: UpdatedVllm) -> asyncio.Task[tuple[int, Any]]:
    """A sample that vLLM has."""
    before = len(vllm.bodies)
    asked = asyncio.create_task(sidecar.generate())
    await until(lambda: len(vllm.bodies) > before)
    return asked
