"""Engines for a rollout, per backend: their own arguments, how they start, and how they stop.

vLLM is started here, as `skyrl rollout`. SGLang runs elsewhere and is registered at a router by its URL. Another
backend is added to `BACKENDS`. Knows nothing of samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import httpx

from skyrl.rollout.config import ALIASES, RolloutConfig, given_values
from skyrl.rollout.errors import EngineError
from skyrl.rollout.sending import error_of, parsed

ENGINE_KEYS = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "max_num_seqs")
"""Options of vLLM that `skyrl rollout` has under names of its own. The others are passed through to vLLM."""
ENGINE_PREFIX = "generator.inference_engine"
POLL_S = 0.2
STOP_S = 60.0
TAIL_BYTES = 2000
SHOWN = 5
"""How many names a warning shows."""
VLLMS_NAMES: dict[str, tuple[str, object]] = {
    "sglang_attention_backend": ("vllm_attention_backend", None),
    "sglang_chat_template": ("vllm_chat_template", None),
    "sglang_context_length": ("vllm_max_model_len", None),
    "sglang_dtype": ("vllm_dtype", "auto"),
    "sglang_enable_return_routed_experts": ("vllm_enable_return_routed_experts", False),
    "sglang_kv_cache_dtype": ("vllm_kv_cache_dtype", "auto"),
    "sglang_max_running_requests": ("vllm_max_num_seqs", None),
    "sglang_mem_fraction_static": ("vllm_gpu_memory_utilization", None),
    "sglang_pipeline_parallel_size": ("vllm_pipeline_parallel_size", 1),
    "sglang_pp_size": ("vllm_pipeline_parallel_size", 1),
    "sglang_quantization": ("vllm_quantization", None),
    "sglang_random_seed": ("vllm_seed", None),
    "sglang_reasoning_parser": ("vllm_reasoning_parser", None),
    "sglang_tensor_parallel_size": ("vllm_tensor_parallel_size", 1),
    "sglang_tool_call_parser": ("vllm_tool_call_parser", None),
    "sglang_tp_size": ("vllm_tensor_parallel_size", 1),
    "sglang_trust_remote_code": ("vllm_trust_remote_code", False),
}
"""Arguments of SGLang that vLLM has, too: under which name, and SGLang's default."""


class EngineHooks(Protocol):
    def finalize_args(self, args: object) -> tuple[str, ...]:
        """The command line of an engine, from a mapping or namespace. Reads only arguments with the backend's prefix.
        Raises ValueError for arguments of another backend."""
        ...

    async def start(self, args: object, *, timeout_s: float = 600.0) -> None:
        """Return when the engines get requests from the router of the configuration. Raises EngineError."""
        ...

    async def stop(self) -> None:
        """Stop or remove what `start` has started or registered. May be called twice."""
        ...


def own_arguments(args: object, backend: str) -> dict[str, Any]:
    """The arguments of `backend` without its prefix; None counts as not given.

    A mapping has what somebody has given, so arguments of another backend in it are wrong. A namespace has a default
    for each of them: these are left out with a warning, but for those that vLLM has under a name of its own, and that
    have another value than SGLang's default. Raises ValueError, which names what to give instead."""
    given = {name: value for name, value in given_values(args).items() if name not in ALIASES}
    own = {name.removeprefix(f"{backend}_"): value for name, value in given.items() if name.startswith(f"{backend}_")}
    prefixes = tuple(f"{other}_" for other in BACKENDS if other != backend)
    others = sorted(name for name in given if name.startswith(prefixes))
    explicit = isinstance(args, Mapping)
    wrong, left_out = list[str](), list[str]()
    for name in others:
        key, default = VLLMS_NAMES.get(name, (None, None))
        if explicit or (key is not None and key not in given and given[name] != default):
            wrong.append(name if key is None else f"{name} (give {key})")
        elif key is None and given[name] is not False:
            left_out.append(name)
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: not for the backend {backend}")
    if left_out:
        some = ", ".join(left_out[:SHOWN])
        warnings.warn(f"{len(left_out)} arguments are not for the backend {backend}, such as {some}", stacklevel=3)
    return own


class VllmHooks:
    """`skyrl rollout` as a process of its own: the vLLMs, a sidecar each, and the router at the configuration's
    address. Each data-parallel part is a vLLM of its own. `rollout_state_dir` must be given."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None

    def finalize_args(self, args: object) -> tuple[str, ...]:
        """Flags of `skyrl rollout`."""
        config = self._config
        if config.rollout_engine_urls:
            raise ValueError(
                "rollout_engine_urls: the backend vllm starts its engines itself; for vLLMs that run already give the "
                "address of a router in front of their sidecars as rollout_router_ip and rollout_router_port"
            )
        flags = ["--host", config.rollout_router_ip, "--port", str(config.rollout_router_port)]
        flags += ["--num-engines", str(config.rollout_num_engines * config.rollout_dp_size)]
        if config.rollout_base_model is not None:
            flags += ["--base-model", config.rollout_base_model]
        if config.rollout_state_dir is not None:
            flags += ["--state-dir", config.rollout_state_dir]
        if config.rollout_router_policy is not None:
            flags += ["--policy", config.rollout_router_policy]
        if config.rollout_strategy == "radix":
            flags += ["--middleware", "radix"]
        options: dict[str, Any] = {}
        for name, value in own_arguments(args, "vllm").items():
            place = "" if name in ENGINE_KEYS else ".engine_init_kwargs"
            options[f"{ENGINE_PREFIX}{place}.{name}"] = value
        if options:
            flags += ["--backend-config", json.dumps(options)]
        return tuple(flags)

    async def start(self, args: object, *, timeout_s: float = 600.0) -> None:
        if self._process is not None:
            raise EngineError("the engines run already")
        if self._config.rollout_state_dir is None:
            raise ValueError("rollout_state_dir: needed to start vLLM; its logs go there")
        await self._check_free()
        log = Path(self._config.rollout_state_dir) / "rollout.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        argv = (sys.executable, "-m", "skyrl.cli.main", "rollout", *self.finalize_args(args))
        env = dict(os.environ)
        if self._config.rollout_api_key is not None:
            env["SKYRL_ROUTER_API_KEY"] = self._config.rollout_api_key
        with log.open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(*argv, stdout=output, stderr=output, env=env)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready(self._process, log)
        except TimeoutError:
            await self.stop()
            raise EngineError(f"no engine was ready within {timeout_s:g} s; the end of {log}:\n{_tail(log)}") from None
        except BaseException:
            await self.stop()
            raise

    async def _check_free(self) -> None:
        """Raises EngineError where a router answers already: it would be taken for that of this rollout."""
        url = self._config.router_url
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            with contextlib.suppress(httpx.TransportError):
                await client.get(f"{url}/live")
                raise EngineError(f"{url} answers already: another rollout runs there")

    async def _ready(self, process: asyncio.subprocess.Process, log: Path) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            while process.returncode is None:
                with contextlib.suppress(httpx.HTTPError):  # the router is still starting
                    if (await client.get(f"{self._config.router_url}/readyz")).status_code == 200:
                        return
                await asyncio.sleep(POLL_S)
        raise EngineError(f"skyrl rollout ended with {process.returncode}; the end of {log}:\n{_tail(log)}")

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


class SglangHooks:
    """Servers of SGLang that run already, at `rollout_engine_urls`, registered at a router that runs already.
    `finalize_args` gives the arguments for whoever launches them."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._registered: list[str] = []

    def finalize_args(self, args: object) -> tuple[str, ...]:
        """Arguments of `python -m sglang.launch_server`."""
        values = own_arguments(args, "sglang")
        values = {name: value for name, value in values.items() if not name.startswith("router_")}
        if self._config.rollout_base_model is not None:
            values.setdefault("model_path", self._config.rollout_base_model)
        if self._config.rollout_dp_size > 1:
            values["dp_size"] = self._config.rollout_dp_size
        if self._config.rollout_deterministic_inference:
            values["enable_deterministic_inference"] = True
        flags: list[str] = []
        for name, value in values.items():
            if value is False:
                continue
            flags.append(f"--{name.replace('_', '-')}")
            if value is not True:
                flags += [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
        return tuple(flags)

    async def start(self, args: object, *, timeout_s: float = 600.0) -> None:
        """Register the servers. The router's probes find out when each one is healthy."""
        own_arguments(args, "sglang")
        if not self._config.rollout_engine_urls:
            raise ValueError("rollout_engine_urls: needed for SGLang, which is not started here")
        try:
            for url in self._config.rollout_engine_urls:
                answer = await self._ask("POST", "/workers", (200, 201, 202), timeout_s, {"url": url})
                name = answer.get("worker_id") if isinstance(answer, dict) else None
                self._registered.append(name if isinstance(name, str) else quote(url, safe=""))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Remove the servers from the router; they go on running."""
        while self._registered:
            await self._ask("DELETE", f"/workers/{self._registered[-1]}", (200, 202, 404), 30.0)
            self._registered.pop()

    async def _ask(self, method: str, path: str, good: tuple[int, ...], timeout_s: float, body: Any = None) -> Any:
        key = self._config.rollout_api_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = f"{self._config.router_url}{path}"
        try:
            async with asyncio.timeout(timeout_s), httpx.AsyncClient(trust_env=False, timeout=None) as client:
                response = await client.request(method, url, json=body, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise EngineError(f"{method} {url}: {type(error).__name__} {error}") from error
        if response.status_code not in good:
            raise EngineError(f"{method} {url}: HTTP {response.status_code}: {error_of(response.content)[0]}")
        return parsed(response.content) if response.content else None


BACKENDS: dict[str, Callable[[RolloutConfig], EngineHooks]] = {"vllm": VllmHooks, "sglang": SglangHooks}


def engine_hooks(config: RolloutConfig) -> EngineHooks:
    """The hooks of the configuration's backend. Raises ValueError for an unknown one."""
    if config.rollout_backend not in BACKENDS:
        raise ValueError(f"rollout_backend: must be one of {', '.join(BACKENDS)}, got {config.rollout_backend!r}")
    return BACKENDS[config.rollout_backend](config)


def _tail(log: Path) -> str:
    return log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
