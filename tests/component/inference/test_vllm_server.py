"""One real vLLM server: `skyrl.inference` starts it, watches it, loads adapters into it and stops it.

The tests share the server, also with test_sidecar_vllm.py, whose tests run first. They run in the order of this file;
the last test stops the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from adapter_hosts import HostWithAllAdapters
from safetensors.torch import load_file, save_file
from tinker.proto.response_conv import deserialize_sample_response
from transformers import AutoModelForCausalLM
from vllm_world import ADAPTER_RANKS, KEY, MODEL, RunningServer, spec_of, until

from skyrl.base.types.weights import AdapterVersion
from skyrl.base.wire.sample_request import Distribution
from skyrl.base.wire.tensors import WireTensor
from skyrl.http.client import HttpClient
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.placement import LocalPlacement
from skyrl.inference.remote.references import reference_to
from skyrl.inference.replica import Addresses, Replica, ReplicaState
from skyrl.inference.vllm_client import VllmError
from skyrl.inference.vllm_plugin.protocol import PROMPT_CELLS, TOKENS_ONLY
from skyrl.router.broadcast import Broadcasts
from skyrl.router.policies import LeastInFlight
from skyrl.router.pool import WorkerPool
from skyrl.router.worker import fetch
from skyrl.sampling import client as prompt_apart
from skyrl.sampling import completion
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.exchanges import answer_bound
from skyrl.sampling.job import SampleJob
from skyrl.sampling.servers import FixedEndpoint
from skyrl.storage.checkpoint_store.directories import link_files
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.checkpoint_store.versions import version_key

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
RANKS: dict[str, int] = dict(zip(("rank8", "rank32"), ADAPTER_RANKS, strict=True))
PROBES = 200
"""Health requests in a row: together they take far longer than a sample of 12 tokens."""


def adapter(directory: Path, rank: int) -> Path:
    """A random adapter on every linear layer and the unembedding, large enough to change every logprob."""
    directory.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(rank)
    config = json.loads((MODEL / "config.json").read_text())
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query, value = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    shapes = {"lm_head": (hidden, vocab)}
    for layer in range(config["num_hidden_layers"]):
        sides = (
            (hidden, query),
            (hidden, value),
            (hidden, value),
            (query, hidden),
            (hidden, wide),
            (hidden, wide),
            (wide, hidden),
        )
        for name, shape in zip(TARGETS, sides, strict=False):
            block = "mlp" if name.endswith(("gate_proj", "up_proj", "down_proj")) else "self_attn"
            shapes[f"model.layers.{layer}.{block}.{name}"] = shape
    tensors = {}
    for module, (width_in, width_out) in shapes.items():
        for part, shape in (("A", (rank, width_in)), ("B", (width_out, rank))):
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = 0.08 * torch.randn(shape, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    peft = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(TARGETS), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(peft))
    return directory


class Reference:
    """Hugging Face transformers in float32, with adapters merged into the weights."""

    def __init__(self, adapters: dict[str, Path]) -> None:
        self.models = {"base": self._base()}
        for name, path in adapters.items():
            model, stored = self._base(), load_file(path / "adapter_model.safetensors")
            tensors = {key: tensor.float() for key, tensor in stored.items()}
            scale = 16 / RANKS[name]
            for key, a in tensors.items():
                if key.endswith("lora_A.weight"):
                    module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    b = tensors[key.replace("lora_A", "lora_B")]
                    with torch.no_grad():
                        model.get_submodule(module).weight += scale * b @ a
            self.models[name] = model

    @staticmethod
    def _base() -> Any:
        return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, name: str, tokens: list[int]) -> list[float]:
        """Logprobs of every token but the first, given the tokens before it."""
        logits = self.models[name](torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def client_of(served: RunningServer, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    """A client with the server's key, or with these headers. It has no timeout; the test's own limit applies."""
    given = {"Authorization": f"Bearer {KEY}"} if headers is None else headers
    return httpx.AsyncClient(base_url=served.spec.url, headers=given, timeout=None)


async def models(served: RunningServer) -> list[str]:
    """The names of the base model and of all loaded adapters."""
    async with client_of(served) as http:
        answer = await http.get("/v1/models")
        answer.raise_for_status()
        return [model["id"] for model in answer.json()["data"]]


async def complete(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    defaults = {"max_tokens": 12, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
    response = await http.post("/v1/completions", json=defaults | body)
    assert response.status_code == 200, response.text
    return response.json()


def tokens_of(rows: Any) -> list[list[int]]:
    """The tokens of top-k rows."""
    assert rows
    return [[token for token, _ in row or []] for row in rows]


def processes_of_group(group: int) -> dict[int, str]:
    """Pid and name of every process in a group, without zombies."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            command = (stat.parent / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, pgrp = rest.split()[:3]
        if int(pgrp) == group and state != "Z":
            found[int(stat.parent.name)] = f"{name} {command}"
    return found


async def test_a_first_look_at_a_models_class_starts_no_process(served: RunningServer) -> None:
    looked = served.config.state_dir / "vllm" / "modelinfos"
    assert [*looked.iterdir()], "vLLM keeps elsewhere what it has found"
    assert served.children_s < 1, "vLLM has imported everything a second time"


async def test_a_ready_server_is_warmed_up_and_published(served: RunningServer) -> None:
    await until(lambda: served.published, 60)  # the first publication failed and was repeated
    assert served.published == [served.spec.url]
    assert served.group.reason == ""
    assert await models(served) == [str(MODEL)]
    assert served.warmed_up_by >= 4, "the warm-up has done the slow work of a first request"
    async with client_of(served) as http:
        await complete(http, prompt=[5, 6, 7], max_tokens=2)


async def test_an_adapter_can_be_loaded_twice_and_unloaded_twice(served: RunningServer, tmp_path: Path) -> None:
    version = AdapterVersion("tenant@1")
    served.host.directories[version] = adapter(tmp_path / "a", 8)
    await served.group.publish_adapter(version)
    await served.group.publish_adapter(version)
    assert version.name in await models(served)
    assert await served.group.retire([version]) == {version}
    assert await served.group.retire([version]) == {version}
    assert version.name not in await models(served)


async def test_the_router_loads_an_adapter_on_all_workers_though_one_had_it(
    served: RunningServer, tmp_path: Path
) -> None:
    """Here the same vLLM is both workers, under two names: the second to load finds the adapter loaded."""
    (tmp_path / "other").mkdir()
    pool = WorkerPool(LeastInFlight())
    one = pool.add(served.spec.url)
    other = pool.add(served.spec.url.replace("127.0.0.1", "localhost"))
    assert one is not other
    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"content-type", b"application/json")]

    broadcasts = Broadcasts(pool, fetch)

    async def status(path: str, **fields: str) -> int:
        body = json.dumps({"lora_name": "spread", **fields}).encode()
        reply = await broadcasts.answer("POST", path, b"", headers, body)
        assert reply is not None
        return reply.status

    path = str(adapter(tmp_path / "a", 8))
    assert await status("/v1/load_lora_adapter", lora_path=path) == 200
    assert "spread" in await models(served)
    assert await status("/v1/load_lora_adapter", lora_path=str(tmp_path / "other")) == 400
    assert await status("/v1/unload_lora_adapter") == 200
    assert await status("/v1/unload_lora_adapter") == 404
    assert "spread" not in await models(served)


async def test_an_adapter_from_the_checkpoint_store_samples_as_its_files_do_also_after_the_store_has_lost_it(
    served: RunningServer, tmp_path: Path
) -> None:
    """vLLM reads an evicted adapter's files again, and would die if they were gone."""
    version, store = AdapterVersion("travels:train:0@1"), open_store(served.config)
    files = adapter(tmp_path / "a", 8)
    with store.writing(version_key(version)) as directory:
        link_files(files, directory)
    body: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 0}
    async with client_of(served) as http:
        await served.client.load_adapter("direct", str(files))
        direct = (await complete(http, model="direct", **body))["choices"][0]
        await served.client.load_adapter(version.name, reference_to(version_key(version)))
        assert (await complete(http, model=version.name, **body))["choices"][0] == direct

        store.delete(version_key(version))
        others = [f"other-{number}" for number in range(9)]
        for name in others:
            await served.client.load_adapter(name, str(adapter(tmp_path / name, 8)))
            await complete(http, model=name, **body)
        assert (await complete(http, model=version.name, **body))["choices"][0] == direct
        with pytest.raises(VllmError, match="the checkpoint store has no adapter") as missing:
            await served.client.load_adapter("gone", reference_to("adapters-travels/v000002"))
        assert missing.value.status == 404
        for name in ("direct", version.name, *others):
            await served.client.unload_adapter(name)


@pytest.mark.slow
async def test_an_unloaded_adapter_leaves_the_engine(served: RunningServer, tmp_path: Path) -> None:
    async def held(http: httpx.AsyncClient) -> list[int]:
        response = await http.post("/collective_rpc", json={"method": "list_loras"})
        return response.json()["results"][0]

    async with client_of(served) as http:
        before = await held(http)
        await served.client.load_adapter("leaves", str(adapter(tmp_path / "leaves", 8)))
        await complete(http, model="leaves", prompt=[5, 6, 7])
        (own,) = set(await held(http)) - set(before)
        await served.client.unload_adapter("leaves")
        deadline = asyncio.get_running_loop().time() + 60
        while own in await held(http):
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.5)
        assert await complete(http, prompt=[5, 6, 7])


async def test_a_bad_adapter_is_refused_and_the_server_goes_on(served: RunningServer, tmp_path: Path) -> None:
    with pytest.raises(VllmError) as missing:
        await served.client.load_adapter("missing", str(tmp_path / "nowhere"))
    assert missing.value.status == 404
    broken = adapter(tmp_path / "broken", 8)
    (broken / "adapter_model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(VllmError) as corrupt:
        await served.client.load_adapter("corrupt", str(broken))
    assert corrupt.value.status == 500
    with pytest.raises(VllmError, match="rank"):
        await served.client.load_adapter("large", str(adapter(tmp_path / "large", 64)))
    assert await served.client.health()


async def test_an_adapter_stored_in_bfloat16_is_used_in_bfloat16(served: RunningServer, tmp_path: Path) -> None:
    exact, rounded = adapter(tmp_path / "exact", 8), adapter(tmp_path / "rounded", 8)
    tensors = load_file(exact / "adapter_model.safetensors")
    halves = {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}
    save_file(halves, rounded / "adapter_model.safetensors")
    await served.client.load_adapter("rounded@1", str(rounded))
    async with client_of(served) as http:
        answer = await complete(http, prompt=[9, 8, 7], model="rounded@1")
    await served.client.unload_adapter("rounded@1")
    (choice,) = answer["choices"]
    given = choice["logprobs"]["token_logprobs"]

    def expected(directory: Path) -> list[float]:
        return Reference({"rank8": directory}).logprobs("rank8", [9, 8, 7, *choice["token_ids"]])[2:]

    assert given == pytest.approx(expected(rounded), abs=1e-4)
    assert given != pytest.approx(expected(exact), abs=1e-4), (
        "rounding changes the logprobs, so the test can tell the two dtypes apart"
    )


async def test_mixed_batches_agree_with_hugging_face(
    served: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Base model and adapters (unembedding trained) in one batch, with and without prompt logprobs."""
    directory = tmp_path_factory.mktemp("adapters")
    adapters = {name: adapter(directory / name, rank) for name, rank in RANKS.items()}
    for name, path in adapters.items():
        await served.client.load_adapter(name, str(path))
    reference = Reference(adapters)
    rng = Random(7)
    names = ["base", *RANKS]
    requests = [(names[i % 3], [rng.randrange(256) for _ in range(rng.choice((1, 2, 17, 60, 150)))]) for i in range(24)]

    async with client_of(served) as http:

        async def ask(i: int, name: str, prompt: list[int]) -> dict[str, Any]:
            model = {} if name == "base" else {"model": name}
            extra = {} if i % 4 == 3 else {"prompt_logprobs": 0}
            return await complete(http, prompt=prompt, n=2, seed=i, **model, **extra)

        answers = await asyncio.gather(*(ask(i, *request) for i, request in enumerate(requests)))

    prompts_checked = 0
    for (name, prompt), answer in zip(requests, answers, strict=True):
        assert len(answer["choices"]) == 2
        for choice in answer["choices"]:
            expected = reference.logprobs(name, prompt + choice["token_ids"])
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected[len(prompt) - 1 :], abs=1e-4)
            of_prompt = choice["prompt_logprobs"]
            if of_prompt is not None:
                given = [row[str(token)]["logprob"] for row, token in zip(of_prompt[1:], prompt[1:], strict=True)]
                assert given == pytest.approx(expected[: len(prompt) - 1], abs=1e-4)
                prompts_checked += 1
    assert prompts_checked == 36


async def test_prompt_and_sequences_requested_apart_equal_one_request(served: RunningServer, tmp_path: Path) -> None:
    """vLLM repeats the prompt's rows in every choice, so the forwarding client requests them once."""
    await served.client.load_adapter("apart", str(adapter(tmp_path / "apart", 8)))
    prompt = [Random(3).randrange(256) for _ in range(300)]
    job = SampleJob(
        request_id="r",
        session_key="s",
        model="apart",
        weights=AdapterVersion("apart"),
        prompt=prompt,
        num_samples=5,
        max_tokens=12,
        distribution=Distribution(),
        seed=11,
        stop_strings=[],
        stop_token_ids=[],
        ignore_eos=True,
        prompt_logprobs=True,
        prompt_logprobs_last_n=None,
        topk_prompt=4,
        topk_sample=2,
    )
    transport = HttpClient()
    client = ForwardingClient(
        transport, FixedEndpoint(served.spec.url), HostWithAllAdapters(), api_key=KEY, deadline_s=120
    )
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    in_one = await transport.post(
        served.spec.url + completion.PATH, completion.encode_request(job), headers, 120, answer_bound(job)
    )
    assert in_one.status == 200, in_one.body[:500]
    rows = [choice["prompt_logprobs"] for choice in json.loads(in_one.body)["choices"]]
    assert rows[1:] == rows[:1] * 4, "each choice repeats the prompt rows"
    expected = deserialize_sample_response(completion.decode_answer(in_one.body, job).body)
    given = deserialize_sample_response((await client.sample(job)).body)
    assert [sequence.tokens for sequence in given.sequences] == [sequence.tokens for sequence in expected.sequences]
    assert [sequence.stop_reason for sequence in given.sequences] == ["length"] * 5
    for ours, reference in zip(given.sequences, expected.sequences, strict=True):
        assert ours.logprobs == pytest.approx(reference.logprobs, abs=1e-4)
        assert tokens_of(ours.topk_logprobs) == tokens_of(reference.topk_logprobs)
    assert given.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    assert given.prompt_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=1e-4)
    assert tokens_of(given.topk_prompt_logprobs) == tokens_of(expected.topk_prompt_logprobs)
    assert given.prompt_cache_hit_tokens == 0, "the prompt was computed once"
    hits = []
    for part in (prompt_apart.prompt_part(job), prompt_apart.sequences_part(job)):
        url, body = served.spec.url + completion.PATH, completion.encode_request(part)
        answer = await transport.post(url, body, headers, 120, answer_bound(part))
        assert answer.whole
        hits.append(completion.decode_answer(answer.body, part).cached_tokens)
    assert hits[0] == 0 < hits[1], "the request for the sequences finds the prompt in the cache"
    named = WireTensor(np.arange(3 * 299) % 256, (299, 3))
    scored = msgspec.structs.replace(prompt_apart.prompt_part(job), target=named, alternatives=2)
    url, body = served.spec.url + completion.PATH, completion.encode_request(scored)
    forms = ("1", PROMPT_CELLS)
    answers = [
        await transport.post(url, body, headers | {TOKENS_ONLY: form}, 120, answer_bound(scored)) for form in forms
    ]
    rows, cells = (completion.decode_answer(answer.body, scored).body for answer in answers)
    assert cells == rows, "arrays have the same bits as objects"
    assert [b'"prompt_cells":' in answer.body for answer in answers] == [False, True]
    assert len(answers[1].body) * 5 < len(answers[0].body)
    await client.close()


async def test_each_sequence_of_a_group_says_what_it_found_in_the_cache(served: RunningServer) -> None:
    """Together they have computed what vLLM's own counters say of all its requests."""
    asked: dict[str, Any] = {"model": served.config.served_names[0], "max_tokens": 3, "temperature": 1.0}

    async def computed(http: httpx.AsyncClient) -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        sums = {
            name: sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:prefix_cache_{name}_total"))
            for name in ("queries", "hits")
        }
        assert sums["queries"] > 0
        told = [line for line in lines if line.startswith("vllm:skyrl_requests_waiting{")]
        assert sorted(line.partition('reason="')[2].partition('"')[0] for line in told) == [
            "adapters",
            "cache",
            "other",
            "seats",
            "tokens",
            "turn",
        ]
        assert any(line.startswith('vllm:skyrl_waiting_bound{engine="0",reason="adapters"}') for line in lines)
        return sums["queries"] - sums["hits"]

    async with httpx.AsyncClient(base_url=served.spec.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        alone = (await http.post("/v1/completions", json=asked | {"prompt": [9, 8, 7]}, timeout=60)).json()
        assert "cached_prompt_tokens" not in alone["choices"][0], "its usage says it"
        for length in (40, 300):
            prompt = [11 + number * length % 97 for number in range(length)]
            before = await computed(http)
            answer = (await http.post("/v1/completions", json=asked | {"prompt": prompt, "n": 4}, timeout=60)).json()
            found = [choice["cached_prompt_tokens"] for choice in answer["choices"]]
            assert len(found) == 4
            assert min(found) == 0, "one of them was the first"
            assert sum(length - each for each in found) == await computed(http) - before


async def test_a_completion_may_do_without_text_unless_it_has_stop_strings(served: RunningServer) -> None:
    asked: dict[str, Any] = {
        "model": served.config.served_names[0],
        "prompt": [5, 6, 7],
        "n": 2,
        "max_tokens": 6,
        "seed": 3,
        "ignore_eos": True,
    }
    asked |= {"logprobs": 0, "return_token_ids": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=served.spec.url, headers=headers, trust_env=False, timeout=120) as http:

        async def choices(more: dict[str, Any], **more_headers: str) -> list[dict[str, Any]]:
            answer = await http.post(completion.PATH, json=asked | more, headers=more_headers)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"]

        only = {TOKENS_ONLY: "1"}
        whole, bare = await choices({}), await choices({}, **only)
        stopping = await choices({"stop": ["\x00never\x00"], "skip_special_tokens": False}, **only)
    for given, reference in zip(bare, whole, strict=True):
        assert given["token_ids"] == reference["token_ids"]
        assert given["logprobs"]["token_logprobs"] == pytest.approx(reference["logprobs"]["token_logprobs"], abs=1e-4)
        assert (given["text"], given["prompt_token_ids"], given["logprobs"]["tokens"]) == ("", None, [])
        assert reference["text"]
    assert all(choice["text"] for choice in stopping), "vLLM looks for stop strings in the text"


async def test_samples_of_one_prompt_share_all_of_it_and_are_those_that_share_nothing(
    served: RunningServer, tmp_path: Path
) -> None:
    count, seed, prompt = 6, 11, [Random(3).randrange(5, 400) for _ in range(45)]
    hits = "vllm:prefix_cache_hits_total{"

    async def cached(http: httpx.AsyncClient) -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(hits))

    async with client_of(served) as http:
        path = adapter(tmp_path / "shared", 8)
        await http.post("/v1/load_lora_adapter", json={"lora_name": "shared", "lora_path": str(path)})
        for model in (str(MODEL), "shared"):
            before = await cached(http)
            group = await complete(http, model=model, prompt=prompt, n=count, seed=seed)
            assert await cached(http) - before == (count - 1) * (len(prompt) - 1)
            # vLLM gives sample i of a request the seed `seed + i`.
            for number, choice in enumerate(sorted(group["choices"], key=lambda choice: choice["index"])):
                salt = f"{Path(model).name} {number}"
                alone = await complete(http, model=model, prompt=prompt, seed=seed + number, cache_salt=salt)
                assert choice["token_ids"] == alone["choices"][0]["token_ids"]
                # Matrices of other sizes: `test_shared_tails_bits.py` compares equal ones.
                expected = pytest.approx(alone["choices"][0]["logprobs"]["token_logprobs"], abs=5e-6)
                assert choice["logprobs"]["token_logprobs"] == expected
        await http.post("/v1/unload_lora_adapter", json={"lora_name": "shared"})


async def test_samples_of_the_base_model_ignore_loaded_adapters(served: RunningServer) -> None:
    reference = Reference({})
    async with client_of(served) as http:
        answer = await complete(http, prompt=[9, 8, 7], prompt_logprobs=0)
    tokens = answer["choices"][0]["token_ids"]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
        reference.logprobs("base", [9, 8, 7, *tokens])[2:], abs=1e-4
    )


async def test_a_pause_freezes_sampling_and_a_resume_continues_it(served: RunningServer) -> None:
    async with client_of(served) as http:
        (await http.post("/pause", params={"mode": "keep"})).raise_for_status()
        sample = asyncio.create_task(complete(http, prompt=[1, 2, 3]))
        for _ in range(PROBES):
            assert await served.client.health()
        assert not sample.done()
        (await http.post("/resume")).raise_for_status()
        assert len((await sample)["choices"][0]["token_ids"]) == 12


async def test_vllm_sleeps_and_wakes(served: RunningServer) -> None:
    """vLLM sleeps and wakes. The test cannot show how much device memory vLLM frees: on a CPU vLLM frees none."""
    assert not await served.client.is_sleeping()
    await served.group.sleep()
    assert await served.client.is_sleeping()
    await served.group.wake()
    assert not await served.client.is_sleeping()
    async with client_of(served) as http:
        assert len((await complete(http, prompt=[1, 2, 3]))["choices"][0]["token_ids"]) == 12


def process_of(served: RunningServer) -> int:
    """The process id of the running server, which is also its process group."""
    pid = served.handle.pid
    assert pid is not None
    return pid


async def sample_of(served: RunningServer, version: AdapterVersion) -> httpx.Response:
    body = {"model": version.name, "prompt": [1, 2, 3], "max_tokens": 2}
    async with client_of(served) as http:
        return await http.post("/v1/completions", json=body)


async def test_a_hanging_server_is_lost_and_returns_with_its_adapters(served: RunningServer, tmp_path: Path) -> None:
    kept, retired, pid = AdapterVersion("kept@1"), AdapterVersion("retired@1"), process_of(served)
    for version in (kept, retired):
        served.host.directories[version] = adapter(tmp_path / version.name, 8)
        await served.group.publish_adapter(version)
    incarnation = served.replica.incarnation
    assert incarnation
    os.killpg(pid, signal.SIGSTOP)
    try:
        await until(lambda: served.replica.state is ReplicaState.LOST, 400)
        assert await served.group.retire([retired]) == set(), "the hanging server may go on and read the files"
        await until(lambda: served.published[-1] is None, 60)
    finally:
        os.killpg(pid, signal.SIGCONT)
    await until(lambda: served.group.ready, 400)
    assert served.replica.incarnation == incarnation
    assert kept in served.replica.adapters
    assert (await sample_of(served, kept)).status_code == 200
    while await served.group.retire([retired]) != {retired}:  # on a slow machine an answer may come too late
        pass
    assert (await sample_of(served, retired)).status_code == 404


@pytest.mark.slow  # vLLM starts again
async def test_a_dead_engine_is_noticed_within_3_s_although_a_request_waits_for_it(
    served: RunningServer, tmp_path: Path
) -> None:
    """vLLM waits for the load of an adapter that its engine has begun, and would refuse connections for a minute."""
    directory, started = adapter(tmp_path / "never", 8), served.handle.incarnation
    group = processes_of_group(process_of(served))
    engine = next(pid for pid, name in group.items() if "EngineCore" in name)
    os.kill(engine, signal.SIGSTOP)
    async with client_of(served) as http:
        load = {"lora_name": "never", "lora_path": str(directory)}
        loading = asyncio.create_task(http.post("/v1/load_lora_adapter", json=load))
        await asyncio.sleep(0.5)
        os.kill(engine, signal.SIGKILL)
        died = time.monotonic()
        await until(lambda: served.handle.incarnation != started, 60)
        assert time.monotonic() - died < 3
        answer = (await asyncio.gather(loading, return_exceptions=True))[0]
        assert isinstance(answer, httpx.TransportError) or (isinstance(answer, httpx.Response) and answer.is_error)
    await until(lambda: served.group.ready and served.handle.incarnation not in (None, started), 400)


@pytest.mark.slow
async def test_a_restarted_server_loads_the_adapters_in_use_before_it_is_ready(
    served: RunningServer, tmp_path: Path
) -> None:
    version, started = AdapterVersion("used@1"), served.handle.incarnation
    assert started is not None
    served.host.directories[version] = adapter(tmp_path / "used", 8)
    await served.group.publish_adapter(version)
    served.in_use.append(version)
    incarnation = served.replica.incarnation
    assert not served.handle.restart("another start")
    assert served.handle.restart(started)
    await until(lambda: served.replica.state is ReplicaState.LOST, 400)
    await until(lambda: served.group.ready, 400)
    assert served.handle.incarnation not in (None, started)
    assert served.replica.incarnation not in (None, incarnation)
    assert await models(served) == [str(MODEL), version.name]
    assert (await sample_of(served, version)).status_code == 200


@pytest.mark.slow
async def test_a_replica_is_added_and_one_removed_while_samples_run(served: RunningServer, tmp_path: Path) -> None:
    """Two servers. Samples for an adapter go to the ready servers in turn, and none fails."""
    version = AdapterVersion("everywhere@1")
    served.host.directories[version] = adapter(tmp_path / "everywhere", 8)
    spec = spec_of(served.config, tmp_path)
    handle = LocalPlacement(tmp_path / "logs").run(spec, [])
    published: list[str | None] = []

    async def publish(url: str | None) -> None:
        published.append(url)

    async def in_use() -> list[AdapterVersion]:
        return [version]

    first, second = (Replica(url, Addresses.same(url), KEY, served.host) for url in (served.spec.url, spec.url))
    group = EngineGroup([first], publish, in_use, proxy_url="http://proxy", watching_interval_s=0.3, grace_s=400)
    running, over, sampled, in_flight = asyncio.create_task(group.run()), asyncio.Event(), Counter(), Counter()

    async def sample(http: httpx.AsyncClient) -> None:
        while not over.is_set():
            url = min((r.id for r in group.replicas if r.state is ReplicaState.READY), key=sampled.__getitem__)
            sampled[url] += 1
            in_flight[url] += 1
            answer = await http.post(
                f"{url}/v1/completions", json={"model": version.name, "prompt": [1], "max_tokens": 2}
            )
            in_flight[url] -= 1
            assert answer.status_code == 200, answer.text
            await asyncio.sleep(0.05)  # leave the CPU to the server that starts

    async def more_samples(*urls: str) -> None:
        before = sampled.copy()
        await until(lambda: all(sampled[url] > before[url] + 5 for url in urls), 400)

    try:
        await until(lambda: group.ready, 400)
        async with client_of(served) as http, asyncio.TaskGroup() as sampling:
            for _ in range(2):
                sampling.create_task(sample(http))
            await more_samples(first.id)
            group.add(second)
            await until(lambda: second.state is ReplicaState.READY, 400)
            await more_samples(first.id, second.id)
            group.drain(first.id)
            await until(lambda: in_flight[first.id] == 0, 400)
            await group.remove(first.id)
            await more_samples(second.id)
            over.set()
        assert published == ["http://proxy"]
        assert await group.retire([version]) == {version}
        assert version.name in await models(served), "the removed server gets no unload call"
        assert await served.group.retire([version]) == {version}
    finally:
        over.set()
        await group.close()
        await running
        await handle.stop()


async def test_closing_the_group_withdraws_the_url_and_stopping_leaves_no_process(served: RunningServer) -> None:
    pid = process_of(served)
    assert len(processes_of_group(pid)) >= 2
    await served.group.close()
    await served.running
    assert served.published[-1] is None
    assert not served.group.ready
    await served.handle.stop()
    assert processes_of_group(pid) == {}
    assert served.handle.incarnation is None
