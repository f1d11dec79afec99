"""A server with SGLang's routes for new weights and a model of two tensors, for tests of the media.

    python -m tests.component.weight_worker PORT

It stages what arrives, as a real server does. `/break` makes the next update fail, `/forget` drops the base of changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from skyrl.weights.deltas import POSITIONS, VALUES, patch
from skyrl.weights.process_group import Group, GroupError, join
from skyrl.weights.segments import SegmentError, opened
from skyrl.weights.tensors import digests

SHAPES = {"a": (4, 3), "b": (5,)}


class Refused(Exception):
    """The message of a 400."""


class WeightWorker:
    def __init__(self) -> None:
        self.version = "default"
        self.weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.paused: str | None = None
        self._groups: dict[str, Group] = {}
        self._staged: dict[str, torch.Tensor] = {}
        self._breaks = False
        self._kept: str | None = None
        self._unfinished = False
        """Some parts of an update have come; as a real server, this one does not go on then."""

    async def model_info(self, _: Any) -> Any:
        sums = {name: float(tensor.float().sum()) for name, tensor in self.weights.items()}
        first = self.weights["a"][0].tolist()
        return {"weight_version": self.version, "paused": self.paused, "sums": sums, "first": first}

    async def loads(self, _: Any) -> Any:
        return {"loads": [], "stages_updates": True}

    async def server_info(self, _: Any) -> Any:
        return {"tp_size": 1}

    async def forget(self, _: Any) -> Any:
        self._kept = None
        return {}

    async def break_next(self, _: Any) -> Any:
        self._breaks = True
        return {}

    async def pause(self, body: Any) -> Any:
        self.paused = body["mode"]
        return {}

    async def resume(self, _: Any) -> Any:
        if self._unfinished:
            raise Refused("an update is not finished")
        self.paused = None
        return {}

    async def from_disk(self, body: Any) -> Any:
        directory = Path(body["model_path"])
        index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        found = {name: load_file(directory / file)[name] for name, file in index.items()}
        if body.get("base") is not None:
            if body["base"] != self._kept:
                raise Refused(f"base: {body['base']} is not kept")
            for name in [name for name in found if name.endswith(POSITIONS)]:
                made = self.weights[of := name.removesuffix(POSITIONS)].clone()
                patch(made, found.pop(name), found.pop(of + VALUES))
                found[of] = made
            found = self.weights | found
        self._staged = found
        if body.get("stage_only"):
            return {"success": True, "applied": False}
        applied = self._apply(body["weight_version"], whole=True)
        self._kept = body["weight_version"] if body.get("keep") else None
        return applied

    async def init(self, body: Any) -> Any:
        self._staged = {}
        try:
            self._groups[body["group_name"]] = await asyncio.to_thread(
                join,
                body["master_address"],
                body["master_port"],
                body["rank_offset"],
                body["world_size"],
                body["group_name"],
                body["backend"],
                body["timeout_s"],
            )
        except GroupError as error:
            raise Refused(str(error)) from error
        return {"success": True}

    async def destroy(self, body: Any) -> Any:
        group = self._groups.pop(body["group_name"], None)
        if group is None:
            raise Refused("there is no such group")
        self._unfinished = False
        await asyncio.to_thread(group.close)
        return {"success": True}

    async def from_group(self, body: Any) -> Any:
        group = self._groups[body["group_name"]]
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            self._staged[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            try:
                await asyncio.to_thread(group.broadcast, self._staged[name])
            except GroupError as error:
                raise Refused(str(error)) from error
        arrived = {name: self._staged[name] for name in body["names"]}
        if body.get("checksums", digests(arrived.items())) != digests(arrived.items()):
            raise Refused("checksums: they differ")
        return self._apply(body["weight_version"], whole=False)

    async def from_memory(self, body: Any) -> Any:
        if body.get("discard"):
            self._staged = {}
            return {"success": True}
        if body["memory"] is not None:
            try:
                segment = opened(body["memory"])
            except SegmentError as error:
                raise Refused(str(error)) from error
            for name, dtype, shape, place in zip(
                body["names"], body["dtypes"], body["shapes"], body["places"], strict=True
            ):
                kind = getattr(torch, dtype)
                size = math.prod(shape) * kind.itemsize
                self._staged[name] = segment[place : place + size].view(kind).view(shape)
            arrived = {name: self._staged[name] for name in body["names"]}
            if body.get("checksums", digests(arrived.items())) != digests(arrived.items()):
                raise Refused("checksums: they differ")
        if body["stage_only"]:
            return {"success": True, "applied": False}
        return self._apply(body["weight_version"], whole=False)

    def _apply(self, version: str, *, whole: bool) -> Any:
        self._unfinished = False
        if self._breaks:
            self._breaks = False
            raise Refused("on purpose")
        if wrong := [name for name, tensor in self._staged.items() if tuple(tensor.shape) != SHAPES.get(name)]:
            raise Refused(f"shapes: {wrong[0]}")
        if self._staged.keys() != SHAPES.keys():
            if whole:
                raise Refused("a tensor is missing")
            self._unfinished = True
            return {"success": True, "applied": False, "message": "a tensor is missing"}
        self.weights = {name: tensor.clone() for name, tensor in self._staged.items()}
        self.version, self._staged = version, {}
        return {"success": True, "applied": True, "message": "done"}


def application(worker: WeightWorker) -> web.Application:
    routes = {
        "/model_info": worker.model_info,
        "/server_info": worker.server_info,
        "/v1/loads": worker.loads,
        "/break": worker.break_next,
        "/forget": worker.forget,
        "/pause_generation": worker.pause,
        "/continue_generation": worker.resume,
        "/update_weights_from_disk": worker.from_disk,
        "/update_weights_from_distributed": worker.from_group,
        "/init_weights_update_group": worker.init,
        "/update_weights_from_tensor": worker.from_memory,
        "/destroy_weights_update_group": worker.destroy,
    }

    async def handle(request: web.Request) -> web.Response:
        try:
            body = await request.json() if request.can_read_body else {}
            return web.json_response(await routes[request.path](body))
        except Refused as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)

    application_ = web.Application()
    application_.router.add_route("*", "/{path:.*}", handle)
    return application_


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        web.run_app(application(WeightWorker()), host="127.0.0.1", port=int(sys.argv[1]), print=None)
