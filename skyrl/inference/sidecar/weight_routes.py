"""SGLang's routes by which a trainer pauses generation, changes the weights, and looks at them.

Each answers GET and POST. A failure is `{"success": false, "message"}`, as SGLang's clients expect, and `{"error"}`
beside it, as all other routes here have it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from skyrl.inference.sidecar.adapters import Adapters
from skyrl.inference.sidecar.call import Call
from skyrl.inference.sidecar.errors import BadRequest, NotOffered, SidecarError, VllmBroke
from skyrl.inference.sidecar.fields import boolean, integer, string
from skyrl.inference.sidecar.memory import Memory
from skyrl.inference.sidecar.parameters import parameters
from skyrl.inference.sidecar.pause import Pause, PauseMode
from skyrl.inference.sidecar.update_requests import (
    DEFAULT_GROUP,
    from_disk,
    from_group,
    from_memory,
    new_group,
    version_of,
)
from skyrl.inference.sidecar.updates import Updates
from skyrl.inference.sidecar.vllm_weights import Ranks, rank_results

SHOWN = 5
Route = Callable[[Call], Awaitable[None]]


class WeightRoutes:
    def __init__(self, pause: Pause, updates: Updates, memory: Memory, adapters: Adapters) -> None:
        self._memory = memory
        self._adapters = adapters
        self._pause = pause
        self._updates = updates

    def routes(self) -> dict[str, Route]:
        answers: dict[str, Callable[[Call], Awaitable[Any]]] = {
            "/pause_generation": self._pause_generation,
            "/continue_generation": self._continue_generation,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_distributed": self._from_distributed,
            "/update_weights_from_tensor": self._from_tensor,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weight_version": self._update_version,
            "/get_weights_by_name": self._weights_by_name,
            "/weights_checker": self._weights_checker,
            "/release_memory_occupation": self._memory.release,
            "/resume_memory_occupation": self._memory.resume,
        }
        routes = {path: _answered(answer) for path, answer in answers.items()}
        own = {"/load_lora_adapter": self._adapters.load, "/unload_lora_adapter": self._adapters.unload}
        return routes | own

    async def _pause_generation(self, call: Call) -> Any:
        mode = (await parameters(call)).get("mode")
        if mode is not None and mode not in [*PauseMode]:
            raise BadRequest(f"mode: {mode!r} is not one of {', '.join(PauseMode)}")
        await self._pause.pause(PauseMode(mode or "abort"))
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue_generation(self, call: Call) -> Any:
        await parameters(call)
        if self._updates.trouble is not None:
            raise BadRequest(f"generation stays paused: {self._updates.trouble}")
        if self._updates.unfinished is not None:
            raise BadRequest(
                f"{self._updates.unfinished}; send them, or give the update up with /destroy_weights_update_group. "
                "The model is as it was"
            )
        await self._pause.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _from_disk(self, call: Call) -> Any:
        return await self._updates.from_disk(from_disk(await parameters(call)))

    async def _from_distributed(self, call: Call) -> Any:
        given = await parameters(call)
        try:
            bucket = from_group(given)
        except BadRequest as error:
            await self._updates.fail_group(given.get("group_name") or DEFAULT_GROUP, error.message)
            raise
        return await self._updates.from_group(bucket)

    async def _from_tensor(self, call: Call) -> Any:
        given = await parameters(call)
        if boolean("discard", given.get("discard") or False):
            return _done("What was staged is forgotten.", await self._updates.discard())
        if "memory" not in given:
            raise NotOffered(
                "serialized tensors are not read, because that would run code of the sender's: use `memory`, "
                "/update_weights_from_distributed, or /update_weights_from_disk"
            )
        return await self._updates.from_memory(from_memory(given))

    async def _init_group(self, call: Call) -> Any:
        group = new_group(await parameters(call))
        return _done(f"The group {group.name!r} is formed.", await self._updates.join(group))

    async def _destroy_group(self, call: Call) -> Any:
        name = string("group_name", (await parameters(call)).get("group_name") or DEFAULT_GROUP)
        return _done(f"The group {name!r} is destroyed.", await self._updates.leave(name))

    async def _update_version(self, call: Call) -> Any:
        given = await parameters(call)
        version = version_of("new_version", given.get("new_version"))
        aborts = given.get("abort_all_requests")
        await self._updates.set_version(
            version, abort_all=True if aborts is None else boolean("abort_all_requests", aborts)
        )
        message = f"Weight version updated to {version}."
        return {"success": True, "message": message, "new_version": version}

    async def _weights_by_name(self, call: Call) -> Any:
        """The first rows of the tensor, as lists of numbers."""
        given = await parameters(call)
        name, most = string("name", given.get("name")), given.get("truncate_size")
        return await self._updates.checks.rows(name, integer("truncate_size", 100 if most is None else most, 0))

    async def _weights_checker(self, call: Call) -> Any:
        given = await parameters(call)
        for field in ("selector", "skip_tensor_list"):
            if given.get(field):
                raise BadRequest(f"{field}: is not offered; every tensor is checked")
        match action := given.get("action"):
            case None | "checksum":
                ranks = await self._updates.checks.check("checksum")
                fields = ("checksums", "per_gpu_checksum", "parallelism_info")
                payload = [{field: rank[field] for field in fields} for rank in ranks]
                return _done("Success.", ranks) | {"payload": payload}
            case "snapshot":
                return _done("Success.", await self._updates.checks.check("snapshot"))
            case "compare":
                return _compared(await self._updates.checks.check("compare"))
            case "reset_tensors":
                return _done("Success.", await self._updates.checks.reset())
            case _:
                raise BadRequest(f"action: {action!r} is not one of checksum, snapshot, compare, reset_tensors")


def _done(message: str, ranks: Ranks) -> dict[str, Any]:
    return {"success": True, "message": message, "rank_results": rank_results(ranks)}


def _compared(ranks: Ranks) -> dict[str, Any]:
    """Raises BadRequest for tensors that differ from the snapshot."""
    differ = [rank | {"broken": _difference(rank["differing"]) if rank["differing"] else None} for rank in ranks]
    if names := sorted({name for rank in ranks for name in rank["differing"]}):
        error = BadRequest(_difference(names))
        error.rank_results = rank_results(differ)
        raise error
    return _done("Success.", ranks)


def _difference(names: Sequence[str]) -> str:
    return f"{len(names)} tensors differ from the snapshot, such as {', '.join(names[:SHOWN])}"


def _answered(answer: Callable[[Call], Awaitable[Any]]) -> Route:
    async def route(call: Call) -> None:
        try:
            value = await answer(call)
        except SidecarError as error:
            status = 400 if isinstance(error, VllmBroke) else error.status
            await call.answer_failure(error, status)
        else:
            await call.answer_json(value)

    return route
