"""An inference server that ignores adapters fails their samples, before it has loaded one; any other is asked once for
all adapters with the same layers. The sibling test with a real vLLM is `inference/test_ignored_adapters.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_upstream import FakeUpstream, Received, Reply, complete, error, fake_upstream, reply
from msgspec.structs import replace
from safetensors.torch import save_file

from skyrl.base.adapter_files import PEFT_JSON, PEFT_TENSORS
from skyrl.base.types.weights import AdapterVersion
from skyrl.base.wire.errors import FailedRequest
from skyrl.http.client import HttpClient
from skyrl.sampling.adapter_probe import AdapterProbe
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.servers import FixedEndpoint
from tests.sample_jobs import JOB

PROBE = "skyrl-probe-"
UNLOAD = "/v1/unload_lora_adapter"


class Directories:
    """Adapters by the number of their version."""

    copies = False

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, number: int, b: float, inputs: int = 4, **more: Any) -> None:
        directory = self.root / str(number)
        directory.mkdir(parents=True)
        name = "base_model.model.model.layers.0.self_attn.q_proj"
        tensors = {f"{name}.lora_A.weight": torch.ones(2, inputs), f"{name}.lora_B.weight": torch.full((4, 2), b)}
        save_file({each: tensor.bfloat16() for each, tensor in tensors.items()}, directory / PEFT_TENSORS)
        (directory / PEFT_JSON).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | more))

    async def bring(self, adapter: AdapterVersion) -> str:
        return str(self.root / str(adapter.number))


def scores(change: float) -> Reply:
    """Logprobs of the enlarged adapter are `change` lower than those of the base model."""

    async def send(request: Received, writer: asyncio.StreamWriter) -> None:
        body = request.json
        if "prompt_logprobs" not in body or "return_token_ids" in body:
            await complete()(request, writer)
            return
        lower = change if body["model"].startswith(PROBE) else 0.0
        rows = [None, *({str(token): {"logprob": -1.0 - lower}} for token in body["prompt"][1:])]
        await reply(200, {"choices": [{"prompt_logprobs": rows}]})(request, writer)

    return send


def loads(alphas: list[float]) -> Reply:
    """Notes the alpha of each enlarged adapter."""

    async def send(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.json["lora_name"].startswith(PROBE):
            described = await asyncio.to_thread((Path(request.json["lora_path"]) / PEFT_JSON).read_text)
            alphas.append(json.loads(described)["lora_alpha"])
        await reply(200, "Success: added", "text/plain")(request, writer)

    return send


class Case:
    """A client of a server that does not run under skyrl."""

    def __init__(self, server: FakeUpstream, root: Path) -> None:
        self.server, self.directories = server, Directories(root / "adapters")
        self.alphas: list[float] = []
        self.scratch = root / "scratch"
        server.adapters = {"base"}
        server.controls[UNLOAD] = reply(200, "Success: removed", "text/plain")
        server.on_load = loads(self.alphas)
        transport = HttpClient()
        self.client = ForwardingClient(
            transport,
            FixedEndpoint(server.url),
            self.directories,
            api_key="key",
            deadline_s=20.0,
            probe=AdapterProbe(transport, "key", "base", self.scratch),
        )

    def moves_by(self, change: float) -> None:
        self.server.default = scores(change)

    async def sample(self, number: int) -> None:
        adapter = AdapterVersion.of("m", number)
        await self.client.sample(replace(JOB, model=adapter.name, weights=adapter))

    @property
    def loaded(self) -> list[str]:
        return [
            request.json["lora_name"].partition(PROBE)[1] or request.json["lora_name"] for request in self.server.loads
        ]


@asynccontextmanager
async def case_in(root: Path) -> AsyncIterator[Case]:
    async with fake_upstream() as server:
        case = Case(server, root)
        try:
            yield case
        finally:
            await case.client.close()


async def test_a_server_that_uses_adapters_is_asked_once_for_all_with_the_same_layers(tmp_path: Path) -> None:
    async with case_in(tmp_path) as case:
        case.moves_by(0.3)
        for number, b in ((1, 1e-6), (2, 0.1)):
            await asyncio.to_thread(case.directories.write, number, b)
        await asyncio.to_thread(case.directories.write, 3, 0.1, 5)
        for number in (1, 2, 3, 3):
            await case.sample(number)
        assert case.loaded == [PROBE, "m@1", "m@2", PROBE, "m@3"]
        assert case.alphas == pytest.approx([0.5 / 1e-6 * 2, 10.0], rel=0.01), "small or not, it is enlarged alike"
        assert not await asyncio.to_thread(lambda: list(case.scratch.iterdir()))
        assert [each.json["lora_name"][: len(PROBE)] for each in case.server.requests if each.path == UNLOAD] == [
            PROBE
        ] * 2


async def test_an_adapter_with_other_ranks_in_some_layers_is_compared_like_others(tmp_path: Path) -> None:
    async with case_in(tmp_path) as case:
        case.moves_by(0.0)
        await asyncio.to_thread(lambda: case.directories.write(1, 0.1, rank_pattern={"q_proj": 8}))
        with pytest.raises(FailedRequest, match="samples the base model"):
            await case.sample(1)
        assert case.alphas == pytest.approx([0.5 / 0.1 * 8], rel=0.01)


async def test_samples_from_adapters_that_a_server_ignores_fail_and_load_none(tmp_path: Path) -> None:
    async with case_in(tmp_path) as case:
        case.moves_by(0.01)
        await asyncio.to_thread(case.directories.write, 1, 0.1)
        for _ in range(2):
            with pytest.raises(FailedRequest, match="takes adapters such as m@1, and samples the base model"):
                await case.sample(1)
        assert case.loaded == [PROBE], "the same question is not asked again at once"


async def test_where_nothing_can_be_compared_the_adapter_is_used(tmp_path: Path) -> None:
    async with case_in(tmp_path) as case:
        case.moves_by(0.0)
        await asyncio.to_thread(case.directories.write, 1, 0.0)
        await case.sample(1)
        await case.sample(2)  # its files are not on this machine
        assert case.loaded == ["m@1", "m@2"]
        await asyncio.to_thread(case.directories.write, 3, 0.1)
        case.server.controls[UNLOAD] = error(404, "no such route")
        case.server.on_load = lambda request, writer: error(500 if PROBE in request.json["lora_name"] else 200, "x")(
            request, writer
        )
        await asyncio.to_thread(case.directories.write, 4, 0.1)
        for number in (3, 4):
            await case.sample(number)
        assert case.loaded == ["m@1", "m@2", PROBE, "m@3", "m@4"], "a server that does not answer is not asked again"


async def test_files_that_are_not_on_the_disk_yet_are_waited_for(tmp_path: Path) -> None:
    """The training server, on another host, has them in its memory (`skyrl.storage.checkpoint_store.held`)."""
    async with case_in(tmp_path) as case:
        case.moves_by(0.0)
        case.server.on_load = error(404, "No adapter found")  # which the fake has nevertheless from then on
        await case.sample(1)
        assert case.loaded == ["m@1"]
