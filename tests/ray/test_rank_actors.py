"""Ranks as actors of a real Ray cluster: the same numbers as without Ray, and dead ranks. `test_engine_with_ranks` has
ranks that wait for room."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import LoraSpec
from skyrl.engine.rank_actors import RankActors, interface_for, start_ranks
from skyrl.runtime.ray_cluster import connection
from skyrl.runtime.ray_cluster.capacity import rank_places
from skyrl.trainer import create_backend
from skyrl.trainer.protocol import AdamParams, RankDied
from skyrl.trainer.ranks.full_backend import FullBackend
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.ranks.lora_rank import ExpertRank
from tests.unit.kept_support import release
from tests.unit.torch_lora_support import (
    assert_close,
    assert_same,
    base_path,
    files_saved,
    make_ranks,
    ok,
    saved,
    sft,
    spec,
    train,
)

from .machines import Machine, Machines

WAIT_S = 300.0
"""Ends a hanging test."""
SHORT_S = 8.0
STEP = AdamParams(learning_rate=1e-2, eps=0.1)


def _config(ranks: int, architecture: str = "qwen3", *, path: str | None = None, **settings: Any) -> ServerConfig:
    """Each rank asks for a node's only box."""
    resources = {"CPU": 1, "box": 1}
    trainer = {"placement.policy_num_cpu_ranks": ranks, "placement.policy_resources": resources, "merge_passes": False}
    return load_config(
        {
            "base_model": path or base_path(architecture),
            "backend_config": {f"trainer.{key}": value for key, value in (trainer | settings).items()},
        }
    )


def _learn(backend: Any, directory: Path, long: int = 30) -> dict[str, Any]:
    """`long`: the tokens of each first pass's first sequence."""
    backend.create_model("m", spec(4, 1))
    for step in range(2):
        ok(backend.run([train("m", sft(step, long, 9, 4)), train("m", sft(step + 9, 7))]))
        backend.optim_step("m", STEP)
    return saved(backend, "m", directory)


@contextmanager
def _ranks(config: ServerConfig, said: list[str] | None = None) -> Iterator[tuple[RankActors, LoraBackend]]:
    group = start_ranks(config, (said if said is not None else []).append)
    with closing(LoraBackend(config, group)) as backend:
        yield group, backend


@pytest.fixture(scope="module")
def nodes(cluster: Machines, two_nodes: list[Machine]) -> Iterator[list[Machine]]:
    """Two nodes; this process is a driver of their cluster."""
    connection.connect(cluster.address, namespace="tests")
    yield two_nodes
    connection.disconnect()


@pytest.mark.slow
def test_two_ranks_on_two_nodes_train_as_one_device_does_until_one_dies(nodes: list[Machine], tmp_path: Path) -> None:
    config = _config(2, rank_timeout_s=60)
    expected = _learn(LoraBackend(config), tmp_path / "one")
    with _ranks(config) as (group, backend):
        assert len(set(group._nodes)) == 2
        state = _learn(backend, tmp_path / "ranks")
        backend.create_model("other", spec(4, 1))
        backend.load_state("other", tmp_path / "ranks", optimizer=True)
        assert_same(saved(backend, "other", tmp_path / "other"), state)
        assert_close(state, expected, 1e-5)
        _named_while_no_command_runs(group, backend, signal.SIGKILL)


@pytest.mark.slow
def test_two_ranks_on_two_nodes_hold_experts_and_give_all_of_an_adapter(nodes: list[Machine], tmp_path: Path) -> None:
    keys: dict[str, Any] = {"placement.expert_parallel": True}
    config = _config(2, "mixture", rank_timeout_s=60, **keys)
    expected = _learn(LoraBackend(config), tmp_path / "one")
    with _ranks(config) as (_, backend):
        state = _learn(backend, tmp_path / "ranks")
        assert_close(state, expected, 1e-4)
        backend.delete_model("m")
        backend.restore_model("m", spec(4, 1), tmp_path / "ranks")
        assert_same(saved(backend, "m", tmp_path / "restored"), state)


@pytest.mark.slow
def test_two_ranks_on_two_nodes_hold_packed_experts_and_give_the_bits_of_ranks_without_ray(
    nodes: list[Machine], tmp_path: Path
) -> None:
    """With all that divides a mixture: packed weights, experts, and a sequence of 40 tokens. Also after a death."""
    path = release("latent-mixture-int4", tmp_path)
    keys: dict[str, Any] = {
        "keep_quantized": True,
        "context_parallel_tokens": 32,
        "placement.expert_parallel": True,
        "placement.policy_num_cpu_ranks": 2,
    }
    with closing(make_ranks(2, path=path, rank_class=ExpertRank, **keys)) as local:
        expected = _learn(local, tmp_path / "local", long=40)
    config = _config(2, path=path, rank_timeout_s=60, micro_batch_tokens=48, **keys)
    with _ranks(config) as (group, backend):
        for memory in group.call("memory"):
            assert memory["held"] < 2 * memory["parameters"], "in full 4 bytes each"
        assert_same(_learn(backend, tmp_path / "ranks", long=40), expected)
        _named_while_no_command_runs(group, backend, signal.SIGKILL)
    with _ranks(config) as (_, backend):
        assert_same(_learn(backend, tmp_path / "again", long=40), expected)


@pytest.mark.slow
def test_two_ranks_on_two_nodes_fine_tune_a_whole_model(nodes: list[Machine], tmp_path: Path) -> None:
    """The files come to the engine, and go to the ranks, over Ray."""
    config = _config(2, rank_timeout_s=60, full_finetuning=True, micro_batch_tokens=48)
    whole = LoraSpec(0, 32.0, 0)
    states = []
    with closing(create_backend(config, start_ranks(config, lambda said: None))) as ranks:
        assert isinstance(ranks, FullBackend)
        for number, backend in enumerate((ranks, FullBackend(config))):
            backend.create_model("m", whole)
            for step in range(2):
                ok(backend.run([train("m", sft(step, 30, 9, 4)), train("m", sft(step + 9, 7))]))
                backend.optim_step("m", STEP)
            states.append(files_saved(backend, "m", tmp_path / str(number)))
        assert_close(states[0], states[1], 1e-5)
        ranks.delete_model("m")
        ranks.restore_model("m", whole, tmp_path / "1")
        assert_same(files_saved(ranks, "m", tmp_path / "restored"), states[1])


def _pids(group: RankActors) -> list[int]:
    import ray

    return ray.get([actor.beat.remote() for actor in group._actors])


@contextmanager
def _second_rank_is_hit(group: RankActors, kind: signal.Signals, after_s: float) -> Iterator[None]:
    """Inside, the second rank's process gets a signal. That is noticed, and the rank is named."""
    victim = _pids(group)[1]
    timer = threading.Timer(after_s, os.kill, (victim, kind))
    timer.start()
    noticed = "died" if kind == signal.SIGKILL else "(died|not answered for 8 s)"
    try:
        with pytest.raises(RankDied, match=rf"rank 1 on node {re.escape(group._nodes[1])} has {noticed}"):
            yield
    finally:
        timer.join()
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def _named_while_no_command_runs(group: RankActors, backend: LoraBackend, kind: signal.Signals) -> None:
    with _second_rank_is_hit(group, kind, 0.0):
        until(lambda: group.failure is not None)
        group.raise_if_failed()
    with pytest.raises(RankDied):
        backend.create_model("more", spec(4, 1))


@pytest.mark.slow
def test_a_stopped_rank_is_named_while_no_command_runs(nodes: list[Machine]) -> None:
    with _ranks(_config(2, rank_timeout_s=SHORT_S)) as (group, backend):
        _named_while_no_command_runs(group, backend, signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_rank_is_named_by_the_command_that_runs(nodes: list[Machine], kind: signal.Signals) -> None:
    with _ranks(_config(2, rank_timeout_s=SHORT_S)) as (group, backend):
        backend.create_model("m", spec(4, 1))
        with _second_rank_is_hit(group, kind, 0.5):
            for _ in range(100):
                backend.run([train("m", sft(1, *[60] * 40))])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_places_of_ranks() -> None:
    def places(cluster_has_gpus: bool = True, **placement: Any) -> Any:
        keys = {f"trainer.placement.{key}": value for key, value in placement.items()}
        flags = {"backend_config": keys, "threads": 3, "checkpoint_store": "file:///shared"}
        return rank_places(load_config(flags), cluster_has_gpus=cluster_has_gpus)

    one_node = places(policy_num_gpus_per_node=4, policy_resources={"fast": 0.5})
    assert one_node.bundles == ({"GPU": 4, "fast": 2},)
    assert (one_node.ranks, one_node.strategy, one_node.cuda) == (4, "STRICT_PACK", True)
    assert one_node.each == {"GPU": 1, "fast": 0.5}
    two_nodes = places(policy_num_gpus_per_node=4, policy_num_nodes=2)
    assert two_nodes.bundles == ({"GPU": 4}, {"GPU": 4})
    assert (two_nodes.ranks, two_nodes.strategy) == (8, "SPREAD")
    without = places(policy_num_cpu_ranks=3)
    assert without.bundles == ({"CPU": 3},) * 3
    assert (without.ranks, without.strategy, without.cuda) == (3, "SPREAD", False)
    assert not places(cluster_has_gpus=False).cuda
    assert places(cluster_has_gpus=False, policy_num_gpus_per_node=2).cuda
    assert places().cuda


def test_the_interface_between_ranks() -> None:
    assert interface_for("127.0.0.2", ["127.0.0.2", "127.0.0.3"]) == "lo"
    assert interface_for("127.0.0.1", ["127.0.0.1", "10.1.2.3"]) == "lo"
    assert interface_for("10.1.2.3", ["10.1.2.3", "10.1.2.4"]) is None
