"""Samples that are cancelled, polled all at once, or sent by clones of a client: the unmodified SDK on real vLLM."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
import tinker
from tinker import types

from skyrl.cli.demo.server import DemoServer

from .conftest import ask, until, vllm_of
from .fault_proxy import FaultProxy, edited

pytestmark = pytest.mark.vllm

PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
SHORT = types.SamplingParams(max_tokens=4, stop=[])
ENDLESS_TOKENS = 4_000  # close to the model's context: a machine that stands still for seconds does not reach it
ENDLESS = types.SamplingParams(max_tokens=ENDLESS_TOKENS, stop=[])
LIMIT_S = 300.0


class Vllm:
    """vLLM's own metrics."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    @property
    def running(self) -> int:
        """The number of sequences that vLLM is computing."""
        return self._sum("vllm:num_requests_running{", "vllm:num_requests_waiting{")

    @property
    def generated(self) -> int:
        """The number of tokens that vLLM has sampled since its start. Work on abandoned samples would show here."""
        return self._sum("vllm:generation_tokens_total{")

    def _sum(self, *names: str) -> int:
        lines = self._http.get("/metrics").text.splitlines()
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(names))


@pytest.fixture(scope="module")
def vllm(server: DemoServer) -> Iterator[Vllm]:
    url, key = vllm_of(server)
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
        yield Vllm(http)


@pytest.fixture
def proxy(server: DemoServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.url) as proxy:
        yield proxy


def outcomes(server: DemoServer, session: str) -> list[tuple[str, str | None]]:
    """(status, error) of a sampling session's samples, in order of arrival."""
    query = "select status, error from futures where sampling_session_id = :session order by n"
    return [(status, error) for status, error in ask(server, query, session=session)]


CANCELLED = ("failed", "cancelled by the client")


def wait_until_polled(proxy: FaultProxy, count: int) -> None:
    """Wait until the SDK has polled for that many samples by their ids. Without the id the SDK cannot cancel a
    sample."""
    until(lambda: len({call.body for call in proxy.seen("/retrieve_future")}) == count)


def test_an_abandoned_task_frees_vllm(server: DemoServer, proxy: FaultProxy, vllm: Vllm) -> None:
    with tinker.ServiceClient(base_url=proxy.url, api_key="tml-test") as client:
        sampler = client.create_sampling_client(base_model="tiny").result()

        async def ask() -> types.SampleResponse:
            return await sampler.sample(PROMPT, 4, ENDLESS)

        async def abandon(sent: int) -> None:
            task = asyncio.create_task(ask())
            await asyncio.to_thread(wait_until_polled, proxy, sent)
            await asyncio.to_thread(until, lambda: vllm.running == 4)
            task.cancel()
            await asyncio.to_thread(until, lambda: vllm.running == 0)
            with pytest.raises(asyncio.CancelledError):
                await task

        until(lambda: vllm.running == 0)
        before = vllm.generated
        for sent in (1, 2, 3):
            asyncio.run(abandon(sent))
        assert vllm.generated - before < 3 * 4 * ENDLESS_TOKENS, "vLLM stopped the abandoned samples"
        until(lambda: outcomes(server, sampler._sampling_session_id) == [CANCELLED] * 3)
        assert len(sampler.sample(PROMPT, 1, SHORT).result().sequences[0].tokens) == 4, "the client still works"


def enable_polls_for_all(proxy: FaultProxy) -> None:
    proxy.always("/client/config", edited(lambda config: config | {"sample_use_retrieve_futures": True}))


def test_one_poll_serves_all_samples(proxy: FaultProxy) -> None:
    enable_polls_for_all(proxy)
    with tinker.ServiceClient(base_url=proxy.url, api_key="tml-test") as client:
        sampler = client.create_sampling_client(base_model="tiny").result()
        answers = [sampler.sample(PROMPT, 2, SHORT) for _ in range(100)]
        for answer in answers:
            assert [len(sequence.tokens) for sequence in answer.result().sequences] == [4, 4]
        with pytest.raises(tinker.BadRequestError):
            sampler.sample(types.ModelInput.from_ints([9999]), 1, SHORT).result()
    fetched = proxy.seen("/retrieve_future")
    assert len(fetched) == 100, "one fetch for each result"
    assert {call.told for call in fetched} == {200}
    assert all(b'"allow_metadata_only":false' in call.body.replace(b" ", b"") for call in fetched)
    polls = proxy.seen("/retrieve_futures")
    assert 0 < len(polls) < 100 + 100
    ends = [end for call in polls for end in (call.answers[0].json()["completions"] if call.told == 200 else [])]
    assert len(ends) == len({end["request_id"] for end in ends}) == 100, "each end is reported once"


CLONE_PROGRAM = """
import sys, tinker
from tinker import types
sampler = tinker.SamplingClient.from_sampler_handle(sys.argv[1], api_key="tml-test")
answer = sampler.sample(types.ModelInput.from_ints([5, 6]), 1, types.SamplingParams(max_tokens=4, stop=[])).result()
print(len(answer.sequences[0].tokens))
"""


@pytest.mark.parametrize("for_all", [pytest.param(True, marks=pytest.mark.slow), False])
def test_clones_of_a_client_use_different_sample_numbers(server: DemoServer, proxy: FaultProxy, for_all: bool) -> None:
    if for_all:
        enable_polls_for_all(proxy)
    with tinker.ServiceClient(base_url=proxy.url, api_key="tml-test") as client:
        sampler = client.create_sampling_client(base_model="tiny").result()
        copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
        for each in (sampler, *copies, *copies):
            assert len(each.sample(PROMPT, 1, SHORT).result().sequences[0].tokens) == 4
        elsewhere = subprocess.run(
            [sys.executable, "-c", CLONE_PROGRAM, sampler.get_sampler_handle()],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert elsewhere.stdout == "4\n", elsewhere.stderr
        session = sampler._sampling_session_id
    query = "select sample_seq_id from futures where sampling_session_id = :session order by 1"
    numbers = [number for (number,) in ask(server, query, session=session)]
    billion = 1_000_000_000
    assert numbers == [0, billion, billion + 1, 2 * billion, 2 * billion + 1, 3 * billion]
    assert len(proxy.seen("/join_sampling_session")) == 3
