"""One, two and three replicas: a replica hangs, restarts, is added or removed while samples run, or all are lost; and
which files may be deleted meanwhile. Scripted servers on real sockets."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from pathlib import Path

import httpx
import pytest
from engine_harness import until
from fake_upstream import COMPLETIONS, LOAD, after, hang_up, never
from replicas import ILL, NEVER_S, SOON_S, TIMEOUTS, UNLOAD, WELL, Server, group_of, replica_at, running, servers

from skyrl.base.types.weights import AdapterVersion
from skyrl.inference.adapter_host import SharedDirectory
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.replica import Addresses, CallTimeouts, Replica, ReplicaState
from skyrl.storage.checkpoint_store import directories
from skyrl.storage.checkpoint_store.local import LocalStore

PROXY = "http://127.0.0.1:9"
HANGS_S = 1.0
"""A server whose health answer takes longer than this three times in a row has hung."""
A, B, C = AdapterVersion("m@1"), AdapterVersion("m@2"), AdapterVersion("m@3")


def replica_of(group: EngineGroup, server: Server) -> Replica:
    return next(replica for replica in group.replicas if replica.addresses.admin == server.url)


def is_in(group: EngineGroup, server: Server, state: ReplicaState) -> bool:
    return replica_of(group, server).state is state


async def until_ready(group: EngineGroup, *wanted: Server) -> None:
    await until(lambda: all(is_in(group, server, ReplicaState.READY) for server in wanted))


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_hanging_replica_is_lost_and_delays_no_adapter(count: int) -> None:
    async with servers(count) as all_of_them:
        first, *others = all_of_them
        replicas = [first.replica(health_s=HANGS_S, unload_s=HANGS_S), *(server.replica() for server in others)]
        group, published = group_of(*replicas, proxy_url=PROXY)
        async with running(group):
            await until_ready(group, *all_of_them)
            await group.publish_adapter(C)
            await group.publish_adapter(A)
            first.hang()
            if others:
                await group.publish_adapter(B)
            else:
                with pytest.raises(httpx.TransportError, match="is lost"):
                    await group.publish_adapter(B)
            assert is_in(group, first, ReplicaState.LOST)
            assert [server.adapters for server in others] == [{A.name, B.name, C.name}] * len(others)
            if others:
                assert group.ready
            else:
                await until(lambda: published[-1] is None)
            assert await group.retire([A, B]) == set(), "the first one may go on, and read them"
            assert [server.adapters for server in others] == [{C.name}] * len(others)
            assert [name for path, name in first.calls if path == UNLOAD] == [A.name], "the group sends one unload call"
            first.may_answer.set()
            await until_ready(group, first)
            assert replica_of(group, first).adapters == {C}, "this adapter was loaded at the start of the server"
            while await group.retire([A, B]) != {A, B}:  # on a slow machine an answer may come too late
                pass
            assert first.adapters == {C.name}


@pytest.mark.parametrize("count", [2, 3])
async def test_a_hanging_replica_delays_nothing_after_another_has_answered(count: int) -> None:
    """All replicas but one hang. Only `grace_s` ends the waiting: no call times out, and no replica is found lost."""
    async with servers(count) as all_of_them:
        *hanging, healthy = all_of_them
        group, _ = group_of(
            *(server.replica() for server in all_of_them), proxy_url=PROXY, watching_s=NEVER_S, grace_s=SOON_S
        )
        async with running(group):
            await until_ready(group, *all_of_them)
            await group.publish_adapter(A)
            await until(lambda: all(replica.adapters == {A} for replica in group.replicas))
            for server in hanging:
                server.hang()
            publishing = asyncio.create_task(group.publish_adapter(B))
            await until(publishing.done)
            publishing.result()
            assert healthy.adapters == {A.name, B.name}
            sweeping = asyncio.create_task(group.retire([A]))
            await until(sweeping.done)
            assert sweeping.result() == set(), "the hanging replicas may resume and read the files"
            await until(lambda: healthy.adapters == {B.name})
            await until(lambda: all((UNLOAD, A.name) in server.calls for server in hanging))
            assert await group.retire([A]) == set()
            for server in hanging:
                assert server.calls.count((UNLOAD, A.name)) == 1, "the first call has no answer yet"
                assert is_in(group, server, ReplicaState.READY)
                assert replica_of(group, server).adapters == set()
                server.may_answer.set()
            await until(lambda: all(server.adapters == {B.name} for server in hanging))
            await until(lambda: all(replica.adapters == {B} for replica in group.replicas))
            while await group.retire([A]) != {A}:
                pass


async def test_a_slow_replica_that_is_lost_loads_the_adapter_before_it_is_ready_again() -> None:
    async with servers(2) as (one, two):
        group, _ = group_of(one.replica(), two.replica(), proxy_url=PROXY, grace_s=SOON_S)
        async with running(group):
            await until_ready(group, one, two)
            answers = dict(one.upstream.controls)
            one.upstream.controls[LOAD] = never
            publishing = asyncio.create_task(group.publish_adapter(A))
            await until(publishing.done)
            publishing.result()
            assert two.adapters == {A.name}
            assert is_in(group, one, ReplicaState.READY)
            one.upstream.controls["/health"] = ILL
            await until(lambda: A in replica_of(group, one).wanted)
            assert is_in(group, one, ReplicaState.LOST)
            may_warm_up = asyncio.Event()
            one.upstream.controls = answers | {COMPLETIONS: after(may_warm_up, answers[COMPLETIONS])}
            await until(lambda: is_in(group, one, ReplicaState.WARMING))
            assert one.adapters == set()
            may_warm_up.set()
            await until_ready(group, one)
            assert one.adapters == {A.name}


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_restarted_replica_loads_the_adapters_in_use_before_it_is_ready(count: int) -> None:
    async with servers(count) as all_of_them:
        first, *others = all_of_them
        group, published = group_of(*(server.replica() for server in all_of_them), proxy_url=PROXY, in_use=[A, B])
        async with running(group):
            await until_ready(group, *all_of_them)
            assert [server.adapters for server in all_of_them] == [{A.name, B.name}] * count
            first.dead = True
            await until(lambda: is_in(group, first, ReplicaState.LOST))
            may_warm_up = asyncio.Event()
            warm = first.upstream.controls[COMPLETIONS]
            first.upstream.controls[COMPLETIONS] = after(may_warm_up, warm)
            first.restart()
            await until(lambda: is_in(group, first, ReplicaState.WARMING))
            await group.publish_adapter(C)
            assert first.adapters == set()
            assert bool(others) == group.ready
            may_warm_up.set()
            await until_ready(group, first)
            assert [server.adapters for server in all_of_them] == [{A.name, B.name, C.name}] * count
            loads = [name for path, name in first.calls if path == LOAD]
            assert loads[2:] == [A.name, B.name, C.name], "adapters in use are loaded first, in their order"
            await until(lambda: published[-1] == PROXY)
        assert (None in published[:-1]) == (not others), "the URL is withdrawn only when no replica is ready"


async def test_a_restart_between_two_probes_is_noticed_by_its_incarnation() -> None:
    async with servers(1) as (server,):
        group, _ = group_of(server.replica(), in_use=[A])
        async with running(group):
            await until_ready(group, server)
            server.restart()
            await until(lambda: server.adapters == {A.name})
            await until_ready(group, server)
            assert replica_of(group, server).incarnation == "start 2"


async def test_an_adapter_that_kills_a_replica_delays_it_once() -> None:
    async with servers(1) as (server,):
        server.dies_of = A.name
        group, _ = group_of(server.replica(), in_use=[A, B])
        async with running(group):
            await until(lambda: is_in(group, server, ReplicaState.LOST))
            assert "warm-up failed" in group.reason
            server.restart()
            await until_ready(group, server)
            assert server.adapters == {B.name}
            assert server.calls.count((LOAD, A.name)) == 1, "the first sample that needs the adapter loads it"


async def test_replicas_are_added_and_removed_while_samples_run() -> None:
    """Samples go to the ready replicas in turn. No sample meets a server without its adapter, or no server."""
    async with servers(3) as (one, two, three), httpx.AsyncClient() as http:
        group, published = group_of(one.replica(), two.replica(), proxy_url=PROXY, in_use=[A])
        sampled, in_flight = Counter[str](), Counter[str]()
        over = asyncio.Event()

        async def sample() -> None:
            body = {"model": A.name, "prompt": [1], "max_tokens": 1, "n": 1}
            while not over.is_set():
                ready = [r.addresses.data for r in group.replicas if r.state is ReplicaState.READY]
                url = min(ready, key=sampled.__getitem__)
                sampled[url] += 1
                in_flight[url] += 1
                answer = await http.post(url + COMPLETIONS, json=body)
                in_flight[url] -= 1
                assert answer.status_code == 200, (url, answer.text)

        async def more_samples_of(*used: Server) -> None:
            before = sampled.copy()
            await until(lambda: all(sampled[server.url] > before[server.url] + 5 for server in used))

        async with running(group):
            await until_ready(group, one, two)
            sampling = [asyncio.create_task(sample()) for _ in range(4)]
            await more_samples_of(one, two)
            group.add(three.replica())
            await until_ready(group, three)
            await more_samples_of(one, two, three)
            group.drain(one.url)
            await until(lambda: in_flight[one.url] == 0)
            assert await group.retire([B]) == {B}, "the removed server still runs, and gets the unload call"
            assert (UNLOAD, B.name) in one.calls
            one.dead = True
            await group.remove(one.url)
            await more_samples_of(two, three)
            over.set()
            await asyncio.gather(*sampling)
            assert await group.retire([A]) == {A}, "a dead server gets no unload call"
            assert (UNLOAD, A.name) not in one.calls
            assert published == [PROXY]


async def test_a_replica_that_is_drained_during_a_health_check_stays_draining() -> None:
    async with servers(2) as (one, two):
        group, _ = group_of(one.replica(), two.replica(), proxy_url=PROXY, watching_s=NEVER_S)
        async with running(group):
            await until_ready(group, one, two)
            replica, may_answer = replica_of(group, one), asyncio.Event()
            one.upstream.requests.clear()
            one.upstream.controls |= {LOAD: hang_up, "/health": after(may_answer, hang_up)}
            publishing = asyncio.create_task(group.publish_adapter(A))
            await until(lambda: [request.path for request in one.upstream.requests] == [LOAD, "/health"])
            group.drain(replica.id)
            may_answer.set()
            await publishing
            assert replica.state is ReplicaState.DRAINING
            assert two.adapters == {A.name}


async def test_a_second_replica_with_the_same_id_is_refused() -> None:
    async with servers(2) as (one, two):
        group, _ = group_of(replica_at(one.url, name="vllm"), proxy_url=PROXY)
        with pytest.raises(ValueError, match="there is a replica 'vllm' already"):
            group.add(replica_at(two.url, name="vllm"))
        assert [replica.addresses.admin for replica in group.replicas] == [one.url]
        await group.close()


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_after_the_loss_of_all_replicas_the_first_that_returns_is_used(count: int) -> None:
    async with servers(count) as all_of_them:
        group, published = group_of(*(server.replica() for server in all_of_them), proxy_url=PROXY, in_use=[A])
        async with running(group):
            await until_ready(group, *all_of_them)
            for server in all_of_them:
                server.dead = True
            await until(lambda: not group.ready)
            await until(lambda: published == [PROXY, None])
            assert all(server.url in group.reason for server in all_of_them)
            await group.publish_adapter(B)
            all_of_them[-1].restart()
            await until(lambda: published == [PROXY, None, PROXY])
            assert all_of_them[-1].adapters == {A.name}
            assert [is_in(group, server, ReplicaState.LOST) for server in all_of_them[:-1]] == [True] * (count - 1)


async def test_files_are_kept_for_a_hanging_replica_until_its_server_is_known_to_be_dead() -> None:
    async with servers(2) as (one, two):
        group, _ = group_of(one.replica(unload_s=HANGS_S, health_s=HANGS_S), two.replica(), proxy_url=PROXY)
        async with running(group):
            await until_ready(group, one, two)
            await group.publish_adapter(A)
            one.hang()
            await until(lambda: is_in(group, one, ReplicaState.LOST))
            assert await group.retire([A]) == set()
            assert await group.retire([A]) == set()
            await group.remove(one.url)
            assert await group.retire([A]) == {A}


async def test_a_later_sweep_goes_on_where_the_last_one_stopped() -> None:
    """100 replicas do not unload all adapters of a sweep within the time that it waits. The next one must not begin
    anew."""
    async with servers(2) as (one, two):
        group, _ = group_of(one.replica(), two.replica(), proxy_url=PROXY, grace_s=0.05)
        async with running(group):
            await until_ready(group, one, two)
            for adapter in (A, B, C):
                await group.publish_adapter(adapter)
            one.hang()
            assert await group.retire([A, B, C]) == set()
            one.may_answer.set()
            await until(lambda: not one.adapters and not two.adapters)
            one.calls.clear()
            two.calls.clear()
            assert await group.retire([A, B, C]) == {A, B, C}
            assert one.calls == two.calls == []
            await group.publish_adapter(A)
            while await group.retire([A, B]) != {A, B}:  # on a slow machine an answer may come too late
                pass
            assert one.calls == two.calls == [(LOAD, A.name), (UNLOAD, A.name)], "A was loaded again"
            assert await group.retire([]) == set()
            while await group.retire([A]) != {A}:
                pass
            assert one.calls[2:] == two.calls[2:] == [(UNLOAD, A.name)], "A was needed again in between"


async def test_files_are_kept_while_a_replica_loads_them() -> None:
    async with servers(1) as (server,):
        group, _ = group_of(server.replica())
        async with running(group):
            await until_ready(group, server)
            may_answer = asyncio.Event()
            server.upstream.controls[LOAD] = after(may_answer, WELL)
            loading = asyncio.create_task(group.publish_adapter(A))
            await until(lambda: any(request.path == LOAD for request in server.upstream.requests))
            assert await group.retire([A]) == set()
            may_answer.set()
            await loading
            assert await group.retire([A]) == {A}


class HangingHost:
    """An AdapterHost whose checkpoint store does not answer."""

    copies = False

    async def bring(self, adapter: AdapterVersion) -> str:
        await asyncio.Event().wait()
        raise AssertionError(adapter)


async def test_missing_files_delay_neither_a_save_nor_a_replica() -> None:
    async with servers(1) as (server,):
        timeouts = CallTimeouts(health_s=NEVER_S, load_s=0.1, unload_s=NEVER_S, sleep_s=NEVER_S, warm_up_s=NEVER_S)
        replica = Replica("slow", Addresses.same(server.url), "key", HangingHost(), timeouts)
        group, _ = group_of(replica, in_use=[A])
        async with running(group):
            await until_ready(group, server)
            with pytest.raises(httpx.TransportError, match="no answer"):
                await group.publish_adapter(B)
            assert group.ready, "the group stays ready, because the server answers"
            assert replica.adapters == set()


async def test_a_full_disk_delays_no_replica_and_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the adapter in use are in the checkpoint store alone."""
    store, state = LocalStore(tmp_path / "store"), tmp_path / "state"
    state.mkdir()
    with store.writing("m/saved-1") as directory:
        (directory / "adapter_config.json").write_text("{}")

    async def store_key(_: AdapterVersion) -> str:
        return "m/saved-1"

    def raise_disk_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(directories, "_link", raise_disk_full)
    async with servers(1) as (server,):
        host = SharedDirectory(lambda: state, store, store_key)
        group, _ = group_of(Replica("r", Addresses.same(server.url), "key", host, TIMEOUTS), in_use=[A])
        async with running(group):
            await until_ready(group, server)
            server.dead = True
            await until(lambda: is_in(group, server, ReplicaState.LOST))
            monkeypatch.undo()
            server.restart()
            await until_ready(group, server)
            assert server.adapters == {A.name}
