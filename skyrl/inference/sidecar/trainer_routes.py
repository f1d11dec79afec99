"""SGLang's routes by which a trainer pauses generation, changes the weights, and looks at them; loads and unloads LoRA
adapters; and takes a vLLM's device memory for itself, and gives it back.

Each answers GET and POST. A failure is `{"success": false, "message"}`, as SGLang's clients expect, and `{"error"}`
beside it, as all other routes here have it. `Memory` knows vLLM's sleep mode, and nothing of weights. On a CPU nothing
is freed, and its routes answer as on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl.http.messages import Reply, json_reply
from skyrl.inference.sidecar.call import Call, boolean, failure_reply, integer, parameters, string
from skyrl.inference.sidecar.errors import BadRequest, NotOffered, SidecarError, VllmBroke
from skyrl.inference.sidecar.facts import KnownConfig
from skyrl.inference.sidecar.in_flight import Hold, InFlight, Pause, PauseMode
from skyrl.inference.sidecar.update_requests import (
    DEFAULT_GROUP,
    from_disk,
    from_group,
    from_memory,
    new_group,
    version_of,
)
from skyrl.inference.sidecar.updates import Updates
from skyrl.inference.sidecar.vllm import Vllm
from skyrl.inference.sidecar.vllm_weights import Ranks, rank_results

LOAD_TIMEOUT_S = 300.0


class Adapters:
    """Each answer has all adapters that are loaded: `{name: path}`."""

    def __init__(self, vllm: Vllm) -> None:
        self._vllm = vllm

    async def load(self, call: Call) -> Reply:
        """400 for a name that is loaded already. `pinned` is ignored: vLLM forgets no adapter by itself."""
        given = await parameters(call)
        name, path = (string(field, given.get(field)) for field in ("lora_name", "lora_path"))
        return await self._change("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload(self, call: Call) -> Reply:
        name = string("lora_name", (await parameters(call)).get("lora_name"))
        return await self._change("/v1/unload_lora_adapter", {"lora_name": name})

    async def _change(self, path: str, body: dict[str, Any]) -> Reply:
        refusal = ""
        try:
            await self._vllm.call_raw("POST", path, body, timeout_s=LOAD_TIMEOUT_S)
        except NotOffered as error:
            raise NotOffered("vLLM was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING or --enable-lora") from error
        except BadRequest as error:
            refusal = error.message
        answer = {"success": not refusal, "error_message": refusal, "loaded_adapters": await self._loaded()}
        return json_reply(400 if refusal else 200, answer)

    async def _loaded(self) -> dict[str, str]:
        answer = await self._vllm.call("GET", "/v1/models")
        try:
            return {one["id"]: one["root"] for one in answer["data"] if one.get("parent")}
        except (TypeError, KeyError, AttributeError) as error:
            raise VllmBroke(f"vLLM's /v1/models is no list of models: {error!r}") from error


WEIGHTS, CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, CACHE)
SLEEP_TIMEOUT_S = 120.0
NO_SLEEP_MODE = "vLLM was started without --enable-sleep-mode, and would free no memory"


@dataclass(eq=False)
class Memory:
    """Generation is held while anything is released."""

    vllm: Vllm
    config: KnownConfig
    in_flight: InFlight
    pause: Pause
    updates: Updates
    released: set[str] = field(default_factory=set)
    hold: Hold | None = None

    async def release(self, call: Call) -> None:
        """New samples wait from now on, until all memory is back. Samples in flight are refused, as SGLang refuses
        them: their client would wait, and their cache would be lost. Raises SidecarError."""
        tags = _tags(await parameters(call))
        self._check_quiet()
        on_cpu = await self.config.device() == "cpu"
        if not on_cpu and (await self.config.get()).get("enable_memory_saver") is False:
            raise NotOffered(NO_SLEEP_MODE)
        async with self.updates.locked():
            if self.hold is None:
                self.hold = await self.pause.hold()
            try:
                self._check_quiet()
                await self._give_away(tags - self.released, on_cpu=on_cpu)
            except SidecarError:
                await self._continue_unless_released()
                raise

    async def resume(self, call: Call) -> None:
        """Generation goes on when all memory is back, unless it was paused by hand. Raises SidecarError."""
        tags = _tags(await parameters(call))
        async with self.updates.locked():
            if not self.released and not self.in_flight.quiet.is_set():
                return  # nothing is released. vLLM's /wake_up would continue samples that are frozen
            rest = self.released - tags
            # vLLM ignores the whole call if one of its tags is not released
            for query in [f"?tags={tag}" for tag in sorted(tags & self.released)] if rest else [""]:
                await self.vllm.call("POST", f"/wake_up{query}", timeout_s=SLEEP_TIMEOUT_S)
            self.released = rest
            self.updates.weights_away = WEIGHTS in rest
            await self._continue_unless_released()

    async def _give_away(self, tags: set[str], *, on_cpu: bool) -> None:
        if WEIGHTS in tags:
            # vLLM gives the cache away, too: without the weights nothing is computed into it
            await self.vllm.call("POST", "/sleep?level=1&mode=abort", timeout_s=SLEEP_TIMEOUT_S)
            self.updates.weights_away = True
        elif tags and WEIGHTS not in self.released and not on_cpu:  # on a CPU vLLM fails
            try:
                await self.vllm.call("POST", "/release_kv_cache_memory", timeout_s=SLEEP_TIMEOUT_S)
            except SidecarError:
                with contextlib.suppress(SidecarError):  # vLLM takes the cache for released, also where that failed
                    await self.vllm.call("POST", f"/wake_up?tags={CACHE}", timeout_s=SLEEP_TIMEOUT_S)
                raise
        self.released |= tags

    async def _continue_unless_released(self) -> None:
        if not self.released and self.hold is not None:
            hold, self.hold = self.hold, None
            await self.pause.let_go(hold)

    def _check_quiet(self) -> None:
        if not self.in_flight.quiet.is_set():
            raise BadRequest(
                f"{self.in_flight.running} requests are in flight: wait for them, or end them with /pause_generation"
            )


def _tags(given: dict[str, Any]) -> set[str]:
    tags = given.get("tags")
    if tags is None:
        return set(TAGS)
    if not isinstance(tags, list) or not tags or any(tag not in TAGS for tag in tags):
        raise BadRequest(f"tags: must be null or a list of {', '.join(TAGS)}, got {tags!r}")
    return set(tags)


SHOWN = 5
Route = Callable[[Call], Awaitable[Any]]
"""Returns its answer: a Reply, or what becomes JSON."""


@dataclass(eq=False)
class WeightRoutes:
    pause: Pause
    updates: Updates
    memory: Memory
    adapters: Adapters

    def routes(self) -> dict[str, Route]:
        answers: dict[str, Route] = {
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
            "/release_memory_occupation": self.memory.release,
            "/resume_memory_occupation": self.memory.resume,
        }
        routes = {path: _answered(answer) for path, answer in answers.items()}
        return routes | {"/load_lora_adapter": self.adapters.load, "/unload_lora_adapter": self.adapters.unload}

    async def _pause_generation(self, call: Call) -> Any:
        mode = (await parameters(call)).get("mode")
        if mode is not None and mode not in [*PauseMode]:
            raise BadRequest(f"mode: {mode!r} is not one of {', '.join(PauseMode)}")
        await self.pause.pause(PauseMode(mode or "abort"))
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue_generation(self, call: Call) -> Any:
        await parameters(call)
        await self.updates.look()
        if self.updates.trouble is not None:
            raise BadRequest(f"generation stays paused: {self.updates.trouble}")
        if self.updates.unfinished is not None:
            raise BadRequest(
                f"{self.updates.unfinished}; send them, or give the update up with /destroy_weights_update_group. "
                "The model is as it was"
            )
        await self.pause.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _from_disk(self, call: Call) -> Any:
        return await self.updates.from_disk(*from_disk(await parameters(call)))

    async def _from_distributed(self, call: Call) -> Any:
        given = await parameters(call)
        try:
            bucket, change = from_group(given)
        except BadRequest as error:
            await self.updates.fail_group(given.get("group_name") or DEFAULT_GROUP, error.message)
            raise
        return await self.updates.from_group(bucket, change)

    async def _from_tensor(self, call: Call) -> Any:
        given = await parameters(call)
        if boolean("discard", given.get("discard") or False):
            return _done("What was staged is forgotten.", await self.updates.discard())
        if "memory" not in given:
            raise NotOffered(
                "serialized tensors are not read, because that would run code of the sender's: use `memory`, "
                "/update_weights_from_distributed, or /update_weights_from_disk"
            )
        return await self.updates.from_memory(*from_memory(given))

    async def _init_group(self, call: Call) -> Any:
        group = new_group(await parameters(call))
        return _done(f"The group {group['name']!r} is formed.", await self.updates.join(group))

    async def _destroy_group(self, call: Call) -> Any:
        name = string("group_name", (await parameters(call)).get("group_name") or DEFAULT_GROUP)
        return _done(f"The group {name!r} is destroyed.", await self.updates.leave(name))

    async def _update_version(self, call: Call) -> Any:
        given = await parameters(call)
        version = version_of("new_version", given.get("new_version"))
        aborts = given.get("abort_all_requests")
        await self.updates.set_version(
            version, abort_all=True if aborts is None else boolean("abort_all_requests", aborts)
        )
        message = f"Weight version updated to {version}."
        return {"success": True, "message": message, "new_version": version}

    async def _weights_by_name(self, call: Call) -> Any:
        """The first rows of the tensor, as lists of numbers."""
        given = await parameters(call)
        name, most = string("name", given.get("name")), given.get("truncate_size")
        return await self.updates.checks.rows(name, integer("truncate_size", 100 if most is None else most, 0))

    async def _weights_checker(self, call: Call) -> Any:
        given = await parameters(call)
        if given.get("selector") or given.get("skip_tensor_list"):
            name = "selector" if given.get("selector") else "skip_tensor_list"
            raise BadRequest(f"{name}: is not offered; every tensor is checked")
        match action := given.get("action"):
            case None | "checksum":
                ranks = await self.updates.checks.check("checksum")
                fields = ("checksums", "per_gpu_checksum", "parallelism_info")
                payload = [{field: rank[field] for field in fields} for rank in ranks]
                return _done("Success.", ranks) | {"payload": payload}
            case "snapshot":
                return _done("Success.", await self.updates.checks.check("snapshot"))
            case "compare":
                return _compared(await self.updates.checks.check("compare"))
            case "reset_tensors":
                return _done("Success.", await self.updates.checks.reset())
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


def _answered(answer: Route) -> Route:
    async def route(call: Call) -> Any:
        try:
            return await answer(call)
        except SidecarError as error:
            return failure_reply(error, 400 if isinstance(error, VllmBroke) else error.status)

    return route
