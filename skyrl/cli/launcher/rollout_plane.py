"""`skyrl rollout`: starts vLLMs, a sidecar for each, and the router in front of the sidecars, and stops them all.

With a Ray cluster, the placement process (`skyrl.cli.ray_placement.rollout_plane`) starts vLLMs and sidecars there, and
tells the router of them; the cluster of this machine is started here if it is asked for.

Knows which processes an inference plane has. The command line of vLLM is `skyrl.inference`'s; what the processes do is
theirs. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.cli.launcher.first_ready import Supervised
from skyrl.cli.launcher.inference_parts import InferenceParts, in_url
from skyrl.cli.launcher.metrics import LauncherMetrics
from skyrl.cli.launcher.parts import Part, Parts
from skyrl.cli.launcher.preflight import Findings, check, check_placed_vllms
from skyrl.cli.launcher.skyrl_processes import PLACEMENT, RAY, log_part, metrics_part
from skyrl.cli.launcher.state_dir import LONGEST_TMPDIR, lock_state_dir, private_directory
from skyrl.http.admin_key import ADMIN_KEY_VARIABLE, ROUTER_KEY_VARIABLE
from skyrl.inference.placement import LocalPlacement
from skyrl.inference.sidecar.settings import KNOWN_VARIABLE
from skyrl.inference.vllm_command import HOST, NO_PROGRESS_BARS, OFFLINE, WEIGHT_UPDATES
from skyrl.router.state_file import FILE_NAME
from skyrl.runtime.metrics.files import FILE_VARIABLE
from skyrl.runtime.processes.ports import HeldPorts, listen
from skyrl.runtime.processes.runtime import PLACED, RUNTIME_ENV, Runtime
from skyrl.runtime.processes.startup import TAIL_LINES, Cause, FirstStarts, StartupError, cause_of_own
from skyrl.runtime.processes.supervision import SupervisedProcess
from skyrl.runtime.processes.systemd import Systemd
from skyrl.runtime.ray_cluster import head

logger = logging.getLogger(__name__)

ROUTER = "router"
DRAIN_S = 2.0
"""How long a sidecar lets samples go on when the plane stops; the router, which stops first, has waited already."""
GRACE_S = 12.0
READY_POLL_S = 0.2
GPU_MEMORY = 0.9
"""The share of a GPU's memory that a vLLM takes which has the GPU for itself."""
WRONG_OPTION = 2
"""The exit code of `skyrl router` and `skyrl sidecar` when an option cannot be used."""


@dataclass(frozen=True)
class PlaneOptions:
    """`config` has the base model, vLLM's options and the state directory. `num_engines` may be 0: then there are only
    `engine_urls`, servers that run elsewhere and speak /generate. `router_arguments` go to `skyrl router` as they are.
    `ray` is the Ray cluster on whose nodes the vLLMs run, as `ray_address` of a server; None: they run here. With
    `weight_updates` trainers can replace all weights.
    """

    config: ServerConfig
    host: str
    port: int
    num_engines: int
    router_arguments: tuple[str, ...]
    engine_urls: tuple[str, ...] = ()
    ray: str | None = None
    weight_updates: bool = True

    @property
    def url(self) -> str:
        """The router's, as seen from this machine."""
        return f"http://{HOST if self.host in ('0.0.0.0', '::') else in_url(self.host)}:{self.port}"


def of_plane(config: ServerConfig, *, weight_updates: bool, cuda: bool) -> ServerConfig:
    """The configuration with the plane's own options of vLLM. What the operator gives wins. On GPUs nothing runs beside
    vLLM by default, so it takes most of the memory, and can give its memory to a trainer of the same GPU in turns."""
    backend = config.backend_config
    inference = backend.inference
    own = (WEIGHT_UPDATES if weight_updates else {}) | ({"enable_sleep_mode": True} if cuda else {})
    changes: dict[str, object] = {"engine_init_kwargs": own | inference.engine_init_kwargs}
    if "gpu_memory_utilization" not in inference.model_fields_set:
        changes["gpu_memory_utilization"] = GPU_MEMORY
    generator = backend.generator.model_copy(update={"inference_engine": inference.model_copy(update=changes)})
    return config.model_copy(update={"backend_config": backend.model_copy(update={"generator": generator})})


class Starts:
    """Knows whether a process that ends can ever start, until the plane was ready once."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._processes: dict[str, Supervised] = {}
        self._starts = FirstStarts()
        self._ready = False
        self._hopeless: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def watch(self, name: str, process: Supervised) -> None:
        self._processes[name] = process

    def ended(self, name: str, code: int, cause: Cause | None) -> None:
        if self._ready or self._hopeless.done() or not self._starts.hopeless(name, cause):
            return
        process = self._processes[name]
        process.give_up()
        tail = process.log_tail()
        sentence = cause.sentence if cause is not None else tail.rpartition("\n")[2] or f"{name} ended with {code}"
        self._hopeless.set_exception(StartupError(sentence, str(self._logs / f"{name}.log"), tail))

    async def until_ready(self, url: str) -> None:
        """Wait until a worker is routable. Raises StartupError when that can never be."""
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            while not self._ready:
                with suppress(httpx.TransportError):  # the router is still starting
                    self._ready = (await client.get(f"{url}/readyz")).status_code == 200
                if not self._ready:
                    await asyncio.wait([self._hopeless], timeout=READY_POLL_S)
                    if self._hopeless.done():
                        self._hopeless.result()


class Plane:
    """One inference plane. The router runs on this machine."""

    def __init__(self, options: PlaneOptions, found: Findings, systemd: Systemd) -> None:
        self._options = options
        self._found = found
        self._systemd = systemd
        self._logs = options.config.state_dir / "logs"
        self._parts = Parts()
        self._held = HeldPorts()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. When this returns or raises, all processes have ended. Raises ConfigError (port,
        options of vLLM), StartupError and ServerEnded."""
        options = self._options
        for listener in listen(options.host, options.port):
            listener.close()  # the port is free; the router opens it itself
        with ExitStack() as resources:
            resources.enter_context(self._held)
            longest = LONGEST_TMPDIR if options.ray is None else head.LONGEST_TMPDIR
            directory = resources.enter_context(private_directory(options.config.state_dir, longest))
            # The sidecars get other ports at each start. A router that is started again meanwhile needs the file.
            (options.config.state_dir / ROUTER / FILE_NAME).unlink(missing_ok=True)
            starts = Starts(self._logs)
            try:
                await self._start(directory, starts)
                await self._until_over(stop, starts)
            finally:
                self._systemd.stopping(f"stopping; this takes at most {self._parts.grace_s:.0f} s")
                logger.info("stopping; this takes at most %.0f s", self._parts.grace_s)
                await self._parts.stop()

    async def _start(self, directory: Path, starts: Starts) -> None:
        options, config = self._options, self._options.config
        key, metrics = secrets.token_urlsafe(32), LauncherMetrics.new()
        published = directory / "metrics"
        await self._add(metrics_part(metrics, published, config.state_dir), log_part(self._logs, config))
        urls = list(options.engine_urls)
        sidecars: tuple[str, ...] = ()
        if options.ray is not None:
            sidecars = await self._start_placed(options.ray, directory, key, starts)
        elif options.num_engines:
            placement = LocalPlacement(self._logs, directory)
            vllms = InferenceParts(
                config, self._found, key, placement, starts, metrics.restarts, self._held, has_trainer=False
            )
            await self._add(*vllms.parts(()))
            ports = self._held.take(len(vllms.replica_urls), but_not={options.port})
            for number, (port, vllm_url) in enumerate(zip(ports, vllms.replica_urls, strict=True)):
                name = f"sidecar-{number}"
                command = ("sidecar", "--port", str(port), "--vllm-url", vllm_url, "--drain-s", str(DRAIN_S))
                command += ("--max-body-bytes", str(config.max_body_bytes))
                command += ("--log-level", config.log_level, "--log-format", config.log_format)
                env = {"SKYRL_VLLM_API_KEY": key, FILE_VARIABLE: str(published / name)}
                env |= {KNOWN_VARIABLE: str(directory / f"{name}.json")}
                await self._add(self._part(name, _skyrl(command), (), env, starts))
                urls.append(f"http://{HOST}:{port}")
                sidecars += (name,)
        workers = [argument for url in urls for argument in ("--worker", url)]
        where = ("--host", options.host, "--port", str(options.port), "--state-dir", str(config.state_dir / ROUTER))
        command = (ROUTER, *where, *workers, *options.router_arguments)
        router_env = {FILE_VARIABLE: str(published / ROUTER)}
        await self._add(self._part(ROUTER, _skyrl(command), sidecars, router_env, starts))

    async def _start_placed(self, ray: str, directory: Path, key: str, starts: Starts) -> tuple[str, ...]:
        """Start what places the vLLMs on a Ray cluster. Returns the parts that the router needs."""
        made = placed_processes(self._options.config, ray, self._found, directory, self._options.url, key, self._held)
        needs: tuple[str, ...] = ()
        placement: list[SupervisedProcess] = []
        if made.ray is not None:

            def ended() -> None:
                """What ran on the cluster has ended with it: the placement process begins anew."""
                if placement and placement[0].pid is not None:
                    placement[0].kill(placement[0].pid)

            await self._add(self._part(RAY, made.ray.argv, (), made.ray.env, starts, grace_s=RAY_GRACE_S, also=ended))
            needs = (RAY,)
        command = made.placement
        placing = self._part(
            PLACEMENT, command.argv, needs, command.env, starts, grace_s=PLACEMENT_GRACE_S, made=placement
        )
        telling = Part("placed", supervise=lambda: tell_changes(directory), duty="telling where the vLLMs run")
        await self._add(placing, telling)
        return (PLACEMENT,)

    def _part(
        self,
        name: str,
        argv: tuple[str, ...],
        needs: tuple[str, ...],
        env: Mapping[str, str],
        starts: Starts,
        *,
        grace_s: float = GRACE_S,
        also: Callable[[], None] = lambda: None,
        made: list[SupervisedProcess] | None = None,
    ) -> Part:
        """A process of the plane. `also` is called when it has ended by itself; the process is appended to `made`."""

        def ended(code: int) -> None:
            also()
            tail = process.log_tail(TAIL_LINES)
            wrong = Cause(process.log_tail(1), final=True) if code == WRONG_OPTION else None
            starts.ended(name, code, wrong or cause_of_own(code, tail))

        process = SupervisedProcess(name, argv, env, self._logs / f"{name}.log", on_exit=ended)
        if made is not None:
            made.append(process)
        starts.watch(name, process)
        running: list[asyncio.Task[None]] = []

        async def start() -> None:
            running.append(asyncio.create_task(process.run(), name=f"supervise {name}"))

        async def supervise() -> None:
            await asyncio.shield(running[0])

        async def end() -> None:
            await process.stop(grace_s)
            await running[0]

        return Part(
            name, needs, start=start, supervise=supervise, duty=f"supervising {name}", stop=end, grace_s=grace_s
        )

    async def _add(self, *parts: Part) -> None:
        for part in parts:
            await self._parts.add(part)

    async def _until_over(self, stop: asyncio.Event, starts: Starts) -> None:
        ready = asyncio.create_task(starts.until_ready(self._options.url))
        stopping, ending = asyncio.create_task(stop.wait()), asyncio.create_task(self._parts.until_one_ends())
        try:
            await asyncio.wait({ready, stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                self._systemd.ready(f"ready at {self._options.url}")
                logger.info("ready: %s (logs in %s)", self._options.url, self._logs)
                await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done() and not stopping.done():
                ending.result()
        finally:
            for task in (ready, stopping, ending):
                task.cancel()
            await asyncio.gather(ready, stopping, ending, return_exceptions=True)


def _skyrl(command: tuple[str, ...]) -> tuple[str, ...]:
    return sys.executable, "-m", "skyrl.cli.main", *command


async def _main(options: PlaneOptions, found: Findings, systemd: Systemd) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    async with systemd.watched():
        await Plane(options, found, systemd).run(stop)


def run_plane(options: PlaneOptions) -> None:
    """Run a plane in the foreground until SIGTERM, SIGINT or SIGHUP. Raises ConfigError, StartupError, ServerEnded."""
    systemd = Systemd.take_from(os.environ)
    systemd.status("starting vLLMs, their sidecars and the router")
    if options.ray is None:
        found = check(options.config) if options.num_engines else Findings([])
    else:
        check_keys(options.ray)
        found = check_placed_vllms(options.config, options.ray)
    config = of_plane(options.config, weight_updates=options.weight_updates, cuda=found.cuda)
    options = replace(options, config=config)
    with lock_state_dir(options.config.state_dir):
        logger.info(
            "starting %d engines with %s, router on %s:%d, state in %s",
            options.num_engines,
            options.config.base_model_path,
            options.host,
            options.port,
            options.config.state_dir,
        )
        asyncio.run(_main(options, found, systemd))
        logger.info("stopped")


LOOK_S = 1.0
PLACEMENT_GRACE_S, RAY_GRACE_S = 15.0, 10.0


def check_keys(ray: str) -> None:
    """Raises ConfigError where sidecars would listen on a network without keys."""
    missing = [name for name in (ROUTER_KEY_VARIABLE, ADMIN_KEY_VARIABLE) if not os.environ.get(name)]
    if ray != "local" and missing:
        raise ConfigError(
            f"ray_address: the engines listen on the network between the nodes of the Ray cluster ({ray}), and nobody "
            f"may reach them without a key: set {' and '.join(missing)}"
        )


@dataclass(frozen=True)
class Command:
    """A process of the plane. `env` is added to this process's environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlacedProcesses:
    """`ray` is None where the cluster runs already."""

    placement: Command
    ray: Command | None


def placed_processes(
    config: ServerConfig,
    ray: str,
    found: Findings,
    directory: Path,
    router_url: str,
    vllm_key: str,
    held: HeldPorts,
) -> PlacedProcesses:
    """The commands of these processes; writes the files that they read into the private `directory`. A cluster of this
    machine gets a port from `held`."""
    cluster = None
    if ray == "local":
        (port,) = held.take(1, head.HOST, but_not={int(router_url.rpartition(":")[2])})
        cluster = head.LocalCluster(config, port, directory)
        cluster.write_token()
    runtime = Runtime(
        config,
        directory,
        router_url,
        vllm_key,
        server_id=f"rollout-{directory.name}",
        ray_address=found.ray_address if cluster is None else cluster.address,
        ray_patience_s=0.0 if cluster is None else head.PATIENCE_S,
        cuda=found.cuda,
    )
    offline = OFFLINE if found.offline else {}
    env = {RUNTIME_ENV: str(runtime.write()), "PYTHONDONTWRITEBYTECODE": "", **NO_PROGRESS_BARS, **offline}
    if cluster is not None:
        env |= cluster.client_environment()
    placement = Command((sys.executable, "-m", "skyrl.cli.ray_placement.rollout_plane"), env)
    if cluster is None:
        return PlacedProcesses(placement, None)
    return PlacedProcesses(
        placement, Command(tuple(cluster.command()), {**cluster.environment(found.devices), **offline})
    )


async def tell_changes(directory: Path) -> None:
    """Log what the placement process says of each vLLM whenever it changes, until cancelled."""
    told: dict[str, str] = {}
    while True:
        try:
            placed = json.loads(await asyncio.to_thread((directory / PLACED).read_text))
        except (OSError, ValueError):  # the placement process is starting
            placed = {}
        for name, what in placed.items():
            if told.get(name) != what:
                logger.info("%s %s", name, what)
        told |= placed
        await asyncio.sleep(LOOK_S)
