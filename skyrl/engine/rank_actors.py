"""The trainer's ranks as Ray actors: finds room for them, starts one actor for each at the engine's start, calls all of
them, watches them, and ends them with the engine.

Ray carries the calls and their arguments. The ranks meet through torch.distributed, whose rendezvous is made here. Does
not know what a rank computes: it is a class, named by its module.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from skyrl.base.config.server import ServerConfig
from skyrl.runtime.processes.ports import free_port, group_variables, interface_of
from skyrl.runtime.ray_cluster.capacity import RankPlaces, nodes, rank_places, reserve
from skyrl.storage.db.faults import DatabaseError, reason
from skyrl.trainer.protocol import RankDied

logger = logging.getLogger(__name__)

START_S = 120.0
"""How long a node may take to start an actor: it imports skyrl, perhaps from a network's file system."""
BEAT_S = 1.0
"""How often each actor is asked for a sign of life."""
CULPRIT_S = 5.0
"""When a rank fails because another does not answer it any more, how long Ray may take to say that the other died."""
LOOK_S = 0.5
_PLAIN = ("CPU", "GPU", "memory")
"""Resources that have an option of their own in Ray."""


class RankActor:
    """The actor of one rank: makes the rank in its process, and runs its methods.

    Ray calls `answer` on one thread, for reads on another, and `beat` on a third. The process ends by itself when
    nobody has asked for a sign of life for `unasked_s`: a node that was cut off from the cluster must not keep its GPU.
    """

    def __init__(self, cuda: bool, unasked_s: float) -> None:
        if not cuda:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._cuda = cuda
        self._rank: Any = None
        self._asked_at = time.monotonic()
        self._unasked_s = unasked_s
        threading.Thread(target=self._end_if_unasked, daemon=True).start()

    def node(self) -> str:
        """The address of the actor's node."""
        import ray

        return ray.util.get_node_ip_address()

    def free_port(self) -> int:
        """For the store of the ranks' process group."""
        return free_port("")

    def make(self, name: str, arguments: Sequence[Any], addresses: Sequence[str]) -> None:
        """Make the rank: an instance of `module:Class`. `addresses` are those of all ranks' nodes."""
        interface = interface_for(self.node(), addresses)
        if interface is not None:
            for variable, value in group_variables(interface).items():
                os.environ.setdefault(variable, value)
        module, _, class_name = name.partition(":")
        self._rank = getattr(import_module(module), class_name)(*arguments)
        if self._cuda and self._rank.device_type != "cuda":
            raise RuntimeError("torch finds no CUDA device on this rank's node, which has a GPU for it")

    def answer(self, call: tuple[str, Sequence[Any]]) -> Any:
        return self._rank.answer(*call)

    def beat(self) -> int:
        """A sign of life: the process id."""
        self._asked_at = time.monotonic()
        return os.getpid()

    def _end_if_unasked(self) -> None:
        while time.monotonic() - self._asked_at < self._unasked_s:
            time.sleep(BEAT_S)
        os._exit(1)


def interface_for(own: str, addresses: Sequence[str]) -> str | None:
    """The network interface over which a rank at the address `own` reaches ranks at `addresses`. None: let gloo and
    NCCL choose."""
    if all(_is_loopback(address) for address in addresses):
        return "lo"
    return interface_of(own)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class RankActors:
    """Ranks on a Ray cluster to which this process is connected; a `RankGroup` of the training backends.

    Each rank is an instance of `rank_class` ("module:Class"), made with its number, the number of ranks, and
    `arguments`. It has the methods `answer(method, arguments)` and `join(host, port, name)`.

    `died` is the exception to raise when a rank has died, does not answer for `timeout_s`, or has raised an exception.
    All other calls raise it from then on. `on_waiting` is told which resource the ranks wait for, and gets an empty
    text when there is room.
    """

    def __init__(
        self,
        places: RankPlaces,
        rank_class: str,
        arguments: Sequence[Any],
        *,
        timeout_s: float,
        died: Callable[[str], BaseException],
        on_waiting: Callable[[str], None],
        name: str,
    ) -> None:
        """Waits for room without an end, then starts the actors. `name`: of this generation, unique in the cluster."""
        self.size = places.ranks
        self._timeout_s = timeout_s
        self._patience_s = max(timeout_s, START_S)
        """How long a rank may give no sign of life. Imports at the start keep a process from answering."""
        self._died = died
        self._calling = threading.Lock()
        self._failing = threading.Lock()
        self._failure: str | None = None
        self._closed = threading.Event()
        self._actors: list[Any] = []
        self._nodes: list[str] = []
        self._watch: threading.Thread | None = None
        self._group = reserve(places.bundles, places.strategy, name=name, on_waiting=on_waiting)
        on_waiting("")
        try:
            self._start(places, rank_class, arguments, name)
        except BaseException:
            self.close()
            raise

    @property
    def failure(self) -> str | None:
        """Why the ranks cannot be used any more; None while they can."""
        return self._failure

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks. The arguments go to each node once."""
        import ray

        with self._calling:
            self.raise_if_failed()
            shared = ray.put((method, arguments))
            return self._answers([actor.answer.remote(shared) for actor in self._actors])

    def call_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call a method on all ranks, on each with its own arguments."""
        with self._calling:
            self.raise_if_failed()
            return self._answers(
                [actor.answer.remote((method, each)) for actor, each in zip(self._actors, arguments, strict=True)]
            )

    def read(self, method: str, *arguments: Any) -> Any:
        return self._read(self._actors[:1], method, arguments)[0]

    def read_all(self, method: str, *arguments: Any) -> list[Any]:
        return self._read(self._actors, method, arguments)

    def _read(self, actors: Sequence[Any], method: str, arguments: Sequence[Any]) -> list[Any]:
        self.raise_if_failed()
        return self._answers(
            [actor.answer.options(concurrency_group="read").remote((method, arguments)) for actor in actors]
        )

    def close(self) -> None:
        """Kill the actors and give their resources back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        self._closed.set()
        if self._failure is None:
            self._failure = "the ranks were ended"
        if self._watch is not None:
            self._watch.join()
        try:
            for actor in self._actors:
                ray.kill(actor)
            remove_placement_group(self._group)
        except Exception as error:  # Ray raises errors of many kinds once its cluster is gone
            logger.warning("the trainer's ranks could not be told to end: %s", _first_line(error))

    def _start(self, places: RankPlaces, rank_class: str, arguments: Sequence[Any], name: str) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote: Any = ray.remote  # Ray's types do not know this option
        actor_class = remote(concurrency_groups={"read": 1, "beat": 1})(RankActor)
        for index in range(places.ranks):
            options = actor_class.options(
                num_cpus=places.each.get("CPU", 0),
                num_gpus=places.each.get("GPU", 0),
                memory=places.each.get("memory") or None,
                resources={key: value for key, value in places.each.items() if key not in _PLAIN},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=index // places.ranks_each
                ),
                max_restarts=0,
            )
            self._actors.append(options.remote(places.cuda, self._patience_s))
        self._nodes = ["?"] * places.ranks
        addresses = self._answers([actor.node.remote() for actor in self._actors], within_s=START_S)
        order = sorted(range(places.ranks), key=lambda index: (addresses[index], index))
        self._actors = [self._actors[index] for index in order]
        self._nodes = [addresses[index] for index in order]
        self._watch = threading.Thread(target=self._watch_ranks, name="rank watch", daemon=True)
        self._watch.start()
        (port,) = self._answers([self._actors[0].free_port.remote()], within_s=START_S)
        made = [
            actor.make.remote(rank_class, (rank, self.size, *arguments), self._nodes)
            for rank, actor in enumerate(self._actors)
        ]
        self._answers(made)
        logger.info("the trainer's ranks 0 to %d run on %s", self.size - 1, ", ".join(sorted(set(self._nodes))))
        self.call("join", self._nodes[0], port, name)
        self._patience_s = self._timeout_s

    def _answers(self, asked: Sequence[Any], within_s: float | None = None) -> list[Any]:
        """The answers by rank. Raises `died` when one does not come."""
        import ray
        from ray.exceptions import RayError

        waiting = list(asked)
        until = None if within_s is None else time.monotonic() + within_s
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK_S)
            for reference in ready:
                try:
                    ray.get(reference)
                except RayError as error:
                    self._fail_with(asked.index(reference), error)
            self.raise_if_failed()
            if waiting and until is not None and time.monotonic() > until:
                self._fail(f"{self._rank(asked.index(waiting[0]))} did not start within {within_s:g} s")
        return [ray.get(reference) for reference in asked]

    def _fail_with(self, rank: int, error: Exception) -> None:
        """A rank has failed. If it is alive, perhaps because another one has died: then name that one."""
        until = time.monotonic() + CULPRIT_S
        while not _is_death(error) and self._failure is None and time.monotonic() < until:
            time.sleep(LOOK_S / 5)
        if _is_death(error):
            self._fail(f"{self._rank(rank)} has died: {_first_line(error)}")
        self._fail(f"{self._rank(rank)} failed: {_first_line(error)}")

    def _fail(self, why: str) -> NoReturn:
        self._record(why)
        assert self._failure is not None
        raise self._died(self._failure)

    def _record(self, why: str) -> None:
        with self._failing:
            if self._failure is None:
                self._failure = why
                logger.error("the trainer's ranks cannot go on: %s", why)

    def raise_if_failed(self) -> None:
        """Raise the exception of a rank that has died."""
        if self._failure is not None:
            raise self._died(self._failure)

    def _rank(self, rank: int) -> str:
        return f"rank {rank} on node {self._nodes[rank]}"

    def _watch_ranks(self) -> None:
        """Ask each rank for a sign of life, also while none is called."""
        import ray
        from ray.exceptions import RayError

        beats: dict[int, tuple[Any, float]] = {}
        while self._failure is None and not self._closed.wait(BEAT_S):
            for rank, actor in enumerate(self._actors):
                if rank not in beats:
                    beats[rank] = actor.beat.options(concurrency_group="beat").remote(), time.monotonic()
                reference, asked_at = beats[rank]
                try:
                    if ray.wait([reference], timeout=0)[0]:
                        ray.get(reference)
                        del beats[rank]
                    elif time.monotonic() - asked_at > self._patience_s:
                        self._record(f"{self._rank(rank)} has not answered for {self._patience_s:g} s")
                except RayError as error:
                    self._record(f"{self._rank(rank)} has died: {_first_line(error)}")


def _is_death(error: Exception) -> bool:
    from ray.exceptions import RayTaskError

    return not isinstance(error, RayTaskError)  # an exception of the rank's own code


def _first_line(error: Exception) -> str:
    """What a rank's error says, without the traceback; what Ray says of an actor's end, without Ray's advice."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def cluster_has_gpus() -> bool:
    return any(node.total.get("GPU", 0) for node in nodes())


LOADING = "loading the base model"
ADAPTER_RANK = "skyrl.trainer.ranks.lora_rank:LoraRank"
EXPERT_RANK = "skyrl.trainer.ranks.lora_rank:ExpertRank"
FULL_RANK = "skyrl.trainer.ranks.full_rank:FullRank"


def start_ranks(config: ServerConfig, publish: Callable[[str], None]) -> RankActors:
    """Start the configured ranks, on a thread. Waits for room without an end; `publish` gets the reason why training is
    not ready: the resource that the cluster lacks, then that the base model is loaded.

    Raises RankDied when a rank does not start.
    """
    from skyrl.trainer.ranks.rank import RankSettings

    def say(missing: str) -> None:
        text = f"waiting for the trainer's ranks: {missing}" if missing else LOADING
        logger.info("%s", text)
        try:
            publish(text)
        except DatabaseError as error:
            logger.warning("could not publish that the engine is %s: %s", text, reason(error))

    places = rank_places(config, cluster_has_gpus=cluster_has_gpus())
    settings = RankSettings.of(config)
    return RankActors(
        places,
        _rank_class(config, places.ranks),
        (settings,),
        timeout_s=settings.timeout_s,
        died=RankDied,
        on_waiting=say,
        name=f"skyrl-ranks-{secrets.token_hex(4)}",
    )


def _rank_class(config: ServerConfig, ranks: int) -> str:
    """A rank alone has all experts anyhow."""
    if config.full_finetuning:
        return FULL_RANK
    return EXPERT_RANK if ranks > 1 and config.backend_config.trainer.placement.expert_parallel else ADAPTER_RANK


async def watch_ranks(ranks: RankActors) -> None:
    """Raises RankDied when a rank dies, also while no command runs."""
    while True:
        await asyncio.sleep(LOOK_S)
        ranks.raise_if_failed()
