"""`GET /metrics` of a router and of a sidecar: their own figures, and those of the processes around them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path

import pytest
from router_world import FakeWorker, running_router
from sidecar_world import FakeVllm, answers, choice, completion, running_sidecar, sidecar_before

from skyrl.base.tiny import model_path
from skyrl.cli.launcher.metrics import LauncherMetrics
from skyrl.router.metrics import EVENTS, RouterMetrics
from skyrl.router.middleware import Chain, RouterContext
from skyrl.router.policies import LeastInFlight
from skyrl.router.pool import WorkerPool
from skyrl.router.proxy import Limits, Proxy
from skyrl.runtime.metrics.files import MetricsDirectory, MetricsWriter, rendered
from tests.unit.runtime.test_metrics import VLLM


class Parts:
    """The parts of a router that its metrics read."""

    def __init__(self, *middleware: str) -> None:
        self.pool, self.counts = WorkerPool(LeastInFlight()), Counter[str]()
        proxy = Proxy(self.pool, Limits(), self.counts, ())
        self.chain = Chain(middleware, proxy, RouterContext(tokenizer_dir=model_path(), options={}))
        self.metrics = RouterMetrics(self.pool, proxy, self.counts, self.chain)

    def shown(self) -> dict[str, float]:
        found = re.findall(r"^(\w+)\{(.*?)\} (\S+)$", rendered(self.metrics.collect()), flags=re.M)
        return {f"{name}{{{labels}}}": float(value) for name, labels, value in found}


async def test_workers_are_shown_by_number_and_a_free_number_is_given_again() -> None:
    parts = Parts()
    first, second = parts.pool.add("http://one:1"), parts.pool.add("http://two:1")
    parts.pool.begin(second)
    parts.pool.quarantine(first, "it refused a connection")
    shown = parts.shown()
    assert shown['skyrl_router_worker_in_flight{worker="1"}'] == 1
    assert shown['skyrl_router_worker_requests_total{worker="1"}'] == 1
    assert shown['skyrl_router_worker_routable{worker="0"}'] == 0
    assert shown['skyrl_router_worker_routable{worker="1"}'] == 1
    assert shown['skyrl_router_workers{state="quarantined"}'] == shown['skyrl_router_workers{state="healthy"}'] == 1
    assert shown["skyrl_router_ejections_total{}"] == 1
    parts.pool.remove(first.url)
    with parts.pool.weights_change([first]):  # that began before
        parts.pool.add("http://three:1")
    workers = {series for series in parts.shown() if series.startswith("skyrl_router_worker_routable")}
    assert workers == {'skyrl_router_worker_routable{worker="0"}', 'skyrl_router_worker_routable{worker="1"}'}


async def test_a_worker_that_an_operator_takes_out_is_shown_as_such_and_is_no_ejection() -> None:
    parts = Parts()
    worker = parts.pool.add("http://one:1")
    parts.pool.set_service(worker, disabled="by hand", is_dead=False)
    assert parts.shown()['skyrl_router_workers{state="out_of_service"}'] == 1
    assert parts.shown()["skyrl_router_ejections_total{}"] == 0


async def test_the_radix_cache_shows_what_it_saved() -> None:
    parts = Parts("radix")
    parts.chain.guards[0].plugin.cache.prompt("some text")
    shown = parts.shown()
    assert shown['skyrl_radix_lookups_total{middleware="0"}'] == 1
    assert shown['skyrl_radix_hits_total{middleware="0"}'] == 0
    assert shown['skyrl_radix_tokens_total{middleware="0"}'] > 0
    assert not [series for series in Parts().shown() if "radix" in series]


def test_every_count_of_the_router_is_a_known_event() -> None:
    package = Path(__file__).parents[3] / "skyrl/router"
    counted = {name for file in package.glob("*.py") for name in re.findall(r'counts\["(\w+)"\]', file.read_text())}
    assert counted == set(EVENTS)


async def until_shown(get: object, wanted: str) -> str:
    while True:
        text: str = await get()  # type: ignore[operator]
        if wanted in text:
            return text
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("short_way", [False, True])
async def test_a_router_answers_for_itself_and_the_processes_around_it(tmp_path: Path, short_way: bool) -> None:
    MetricsWriter(MetricsDirectory(tmp_path), "launcher", LauncherMetrics.new().registry).write()
    async with running_router(FakeWorker(), short_way=short_way, metrics_directory=tmp_path) as router:

        async def get() -> str:
            async with router.session.get(f"{router.url}/metrics") as answer:
                assert answer.status == 200
                assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
                return await answer.text()

        text = await until_shown(get, 'skyrl_router_workers{state="healthy",process="router"} 1.0')
        assert 'process_open_fds{process="router"}' in text
        assert 'skyrl_vllm_restarts_total{reason="hung",process="launcher"} 0.0' in text


async def test_a_router_with_a_key_shows_its_metrics_to_those_who_have_it() -> None:
    async with running_router(FakeWorker(), key="secret") as router:
        for headers, status in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
            async with router.session.get(f"{router.url}/metrics", headers=headers) as answer:
                assert answer.status == status


async def test_a_sidecar_shows_its_samples_and_its_vllm() -> None:
    vllm = FakeVllm(answers(completion(choice([7, 8]))))
    vllm.answer["/metrics"] = lambda exchange: exchange.answer(VLLM.encode())
    async with sidecar_before(vllm, number=3) as sidecar:

        async def get() -> str:
            async with sidecar.session.get(f"{sidecar.url}/metrics") as answer:
                assert answer.status == 200
                return await answer.text()

        await until_shown(get, 'vllm:num_requests_running{engine="0",replica="3"} 3.0')
        text = await until_shown(get, 'skyrl_sidecar_running{process="sidecar-3"} 0.0')
        assert 'skyrl_sidecar_paused{process="sidecar-3"} 0.0' in text
        assert "lora_requests_info" not in text


async def test_a_sidecar_without_vllm_shows_its_own_metrics() -> None:
    async with running_sidecar("http://127.0.0.1:9") as sidecar:

        async def get() -> str:
            async with sidecar.session.get(f"{sidecar.url}/metrics") as answer:
                return await answer.text()

        assert "vllm:" not in await until_shown(get, 'skyrl_sidecar_waiting{process="sidecar-0"} 0.0')
