"""Samples with pictures from a real vLLM on a CPU, through the forwarding client, beside transformers and PEFT."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
from PIL import Image
from seeing_model import END, START, Reference, make_seeing_model, with_adapter
from tinker import SampleResponse
from tinker.proto.response_conv import deserialize_sample_response

from skyrl.base.config.loading import load_config
from skyrl.base.pictures.picture import PictureFormat, PlacedPicture, digest_of
from skyrl.base.pictures.vision import VisionConfig
from skyrl.base.types.weights import AdapterVersion, BaseWeights
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.base.wire.sample_request import Distribution
from skyrl.base.wire.tensors import WireTensor
from skyrl.http.client import HttpClient
from skyrl.inference.placement import LocalPlacement, LocalServer, ServerSpec
from skyrl.inference.vllm_command import vllm_spec
from skyrl.runtime.processes.ports import free_port
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.job import Pictures, SampleJob
from skyrl.sampling.servers import FixedEndpoint
from skyrl.storage.db.pictures import PictureFiles
from tests.component.inference.test_families_vllm import MODELS, as_released
from tests.families import IMAGE_TOKEN, VOCAB
from tests.sample_jobs import JOB

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

KEY = "test-key"
EXACT = 1e-5
"""Of the difference between a logprob of vLLM and transformers' in float32."""
GREEDY = Distribution(temperature=0.0)
ADAPTER = AdapterVersion("m@1")


def picture(width: int, height: int, seed: int, format: PictureFormat = "png") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


WIDE, TALL = picture(100, 64, 1), picture(40, 90, 2, "jpeg")
SIZES: dict[bytes, tuple[int, int, PictureFormat]] = {WIDE: (100, 64, "png"), TALL: (40, 90, "jpeg")}
FILES = {digest_of(data): data for data in SIZES}


class Files(PictureFiles):
    """All files of the tests, without a database."""

    def __init__(self) -> None:
        pass

    async def of(self, pictures: Pictures) -> dict[str, bytes]:
        return {each.digest: FILES[each.digest] for each in pictures.placed}


@dataclass
class Host:
    """A host that has the files of one adapter."""

    directory: Path
    copies: bool = False

    async def bring(self, adapter: AdapterVersion) -> str:
        return str(self.directory)


@dataclass
class Served:
    """A running vLLM, and its model as transformers has it."""

    path: str
    adapter: Path
    spec: ServerSpec
    client: ForwardingClient
    http: httpx.AsyncClient

    def job(self, *parts: int | bytes, **changes: Any) -> SampleJob:
        """A job whose prompt has these token ids and pictures."""
        sight, prompt, placed = VisionConfig.of(self.path), list[int](), list[PlacedPicture]()
        for part in parts:
            if isinstance(part, int):
                prompt.append(part)
                continue
            width, height, format = SIZES[part]
            tokens = sight.tokens(width, height)
            placed.append(PlacedPicture(len(prompt), tokens, digest_of(part), format))
            prompt += [IMAGE_TOKEN] * tokens
        pictures = Pictures("tenant", IMAGE_TOKEN, tuple(placed)) if placed else None
        fixed = {"prompt": prompt, "pictures": pictures, "model": self.path, "max_tokens": 6, "ignore_eos": True}
        # With this seed no test samples IMAGE_TOKEN, which transformers would take for a picture.
        return msgspec.structs.replace(JOB, **({"seed": 5} | fixed | changes))

    async def sample(self, job: SampleJob) -> SampleResponse:
        return deserialize_sample_response((await self.client.sample(job)).body)


async def until_up(http: httpx.AsyncClient, server: LocalServer) -> None:
    end, starts = time.monotonic() + 200, set[str]()
    while True:
        try:
            if (await http.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        starts |= {server.incarnation} if server.incarnation else set()
        assert time.monotonic() < end, server.log_tail(40)
        assert len(starts) <= 1, server.log_tail(80)  # it has ended, and was started again
        await asyncio.sleep(0.2)


@asynccontextmanager
async def serving(path: str, directory: Path, **options: Any) -> AsyncIterator[Served]:
    adapter = with_adapter(path, directory / "adapter")
    backend = {"generator.inference_engine.engine_init_kwargs": options}
    spec = vllm_spec(load_config({"base_model": path, "backend_config": backend}), free_port(), KEY, cuda=False)
    server = LocalPlacement(directory).run(spec)
    http = httpx.AsyncClient(base_url=spec.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    client = ForwardingClient(
        HttpClient(), FixedEndpoint(spec.url), Host(adapter), api_key=KEY, deadline_s=60.0, pictures=Files()
    )
    try:
        await until_up(http, server)
        yield Served(path, adapter, spec, client, http)
    finally:
        await client.close()
        await http.aclose()
        await server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    directory = tmp_path_factory.mktemp("served")
    async with serving(make_seeing_model("qwen3-vl", directory), directory) as made:
        yield made


ONE = (5, 6, START, WIDE, END, 7, 8, 9)
TWO = (5, START, WIDE, END, 6, 7, START, TALL, END, 8, START, WIDE, END, 9)


def whole(job: SampleJob, answer: SampleResponse) -> tuple[list[int], list[float]]:
    """Prompt and first sequence, and the logprobs of all tokens but the first."""
    (sequence, *_) = answer.sequences
    assert answer.prompt_logprobs is not None
    assert sequence.logprobs is not None
    return [*job.prompt, *sequence.tokens], [*answer.prompt_logprobs[1:], *sequence.logprobs]  # type: ignore[list-item]


@pytest.mark.parametrize("weights", [BaseWeights(), ADAPTER], ids=["base model", "adapter"])
@pytest.mark.parametrize("parts", [ONE, TWO, (WIDE, 5)], ids=["one", "three", "first"])
async def test_logprobs_of_prompt_and_sample_are_those_of_transformers(
    served: Served, weights: Any, parts: Sequence[int | bytes]
) -> None:
    """The adapter is not loaded at first: vLLM answers 404, and the client loads it."""
    named = {} if isinstance(weights, BaseWeights) else {"model": weights.name}
    job = served.job(*parts, weights=weights, prompt_logprobs=True, **named)
    tokens, found = whole(job, await served.sample(job))
    expected = Reference(served.path, served.adapter if named else None).logprobs(tokens, job.pictures, FILES)
    gap = float(np.abs(np.array(found) - expected).max())
    print(f"largest gap of a logprob: {gap:.1e}")
    assert gap <= EXACT


async def test_the_adapter_changes_logprobs(served: Served) -> None:
    job = served.job(*ONE)
    base, adapted = (
        Reference(served.path, adapter).logprobs(job.prompt, job.pictures, FILES) for adapter in (None, served.adapter)
    )
    assert np.abs(base - adapted).max() > 0.1


async def test_the_picture_changes_what_is_sampled(served: Served) -> None:
    seen, other = (
        Reference(served.path).logprobs(served.job(*ONE).prompt, pictures, FILES)
        for pictures in (served.job(*ONE).pictures, None)
    )
    assert np.abs(seen - other).max() > 0.1


async def test_samples_of_one_seed_are_the_same_and_differ_among_themselves(served: Served) -> None:
    job = served.job(*TWO, num_samples=4, seed=11)
    first, second = [[sequence.tokens for sequence in (await served.sample(job)).sequences] for _ in range(2)]
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 4


async def test_pictures_side_by_side_are_taken(served: Served) -> None:
    """transformers takes them for one picture, so there is nothing to compare with."""
    job = served.job(5, WIDE, TALL, WIDE, 6, prompt_logprobs=True)
    assert len((await served.sample(job)).prompt_logprobs or []) == len(job.prompt)


async def test_several_samples_with_prompt_logprobs(served: Served) -> None:
    job = served.job(*ONE, num_samples=4, prompt_logprobs=True, topk_prompt=2)
    answer = await served.sample(job)
    assert len(answer.sequences) == 4
    rows = Reference(served.path).distributions(job.prompt, job.pictures, FILES)
    assert answer.topk_prompt_logprobs is not None
    for row, found in zip(rows, answer.topk_prompt_logprobs[1:], strict=True):
        assert found is not None
        assert [token for token, _ in found] == np.argsort(-row)[:2].tolist()


async def test_best_tokens_of_a_sample_are_whole(served: Served) -> None:
    job = served.job(*ONE, topk_sample=3)
    (sequence,) = (await served.sample(job)).sequences
    rows = Reference(served.path).distributions([*job.prompt, *sequence.tokens], job.pictures, FILES)
    assert sequence.topk_logprobs is not None
    for row, found in zip(rows[len(job.prompt) - 1 :], sequence.topk_logprobs, strict=True):
        assert found is not None
        assert [token for token, _ in found] == np.argsort(-row)[:3].tolist()
        assert [value for _, value in found] == pytest.approx(np.sort(row)[::-1][:3], abs=EXACT)


async def test_a_stop_string_ends_a_sample(served: Served) -> None:
    job = served.job(*ONE, distribution=GREEDY)
    (free,) = (await served.sample(job)).sequences
    stop = f"w{free.tokens[2]} "
    (stopped,) = (await served.sample(msgspec.structs.replace(job, stop_strings=[stop]))).sequences
    assert (free.stop_reason, stopped.stop_reason) == ("length", "stop")
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]
    assert len(stopped.tokens) < len(free.tokens)


async def test_a_stop_token_ends_a_sample(served: Served) -> None:
    job = served.job(*ONE, distribution=GREEDY)
    (free,) = (await served.sample(job)).sequences
    (stopped,) = (await served.sample(msgspec.structs.replace(job, stop_token_ids=[free.tokens[2]]))).sequences
    assert (stopped.stop_reason, stopped.tokens) == ("stop", free.tokens[: free.tokens.index(free.tokens[2]) + 1])


async def test_the_plugin_scores_prompts_with_pictures(served: Served) -> None:
    job = served.job(*ONE)
    rows = Reference(served.path).distributions(job.prompt, job.pictures, FILES)
    ids = np.random.default_rng(3).integers(0, VOCAB, len(rows))
    target = WireTensor(ids, (len(rows), 1))
    answer = await served.sample(msgspec.structs.replace(job, target=target, alternatives=2, seed=4))
    assert answer.target_prompt_logprobs is not None
    found = np.array(answer.target_prompt_logprobs.tolist()).ravel()
    assert found == pytest.approx(rows[np.arange(len(rows)), ids], abs=EXACT)
    drawn = answer.prompt_alt_tokens
    assert drawn is not None
    tokens, logprobs = np.array(drawn.tokens.tolist()), np.array(drawn.logprobs.tolist())
    assert logprobs == pytest.approx(np.take_along_axis(rows, tokens, axis=1), abs=EXACT)


async def test_a_temperature_above_vllms_bound_and_a_priority(served: Served) -> None:
    job = served.job(*ONE, distribution=Distribution(temperature=5.0))
    assert deserialize_sample_response((await served.client.sample(job, priority=-3)).body).sequences[0].tokens


async def failure_of(served: Served, job: SampleJob) -> FailedRequest:
    with pytest.raises(FailedRequest) as failed:
        await served.sample(job)
    return failed.value


async def test_another_count_of_a_pictures_tokens_fails_the_sample_with_both_numbers(served: Served) -> None:
    job = served.job(*ONE)
    assert job.pictures is not None
    (placed,) = job.pictures.placed
    longer = msgspec.structs.replace(placed, tokens=placed.tokens + 2)
    prompt = [*job.prompt[: placed.start], *[IMAGE_TOKEN] * 2, *job.prompt[placed.start :]]
    pictures = msgspec.structs.replace(job.pictures, placed=(longer,))
    failed = await failure_of(served, msgspec.structs.replace(job, prompt=prompt, pictures=pictures))
    assert failed.category is ErrorCategory.SERVER
    assert f"made {placed.tokens} tokens of image 1" in str(failed)
    assert f"counted {longer.tokens}" in str(failed)


async def test_a_picture_whose_first_request_was_refused_is_sampled_at_the_first_try(served: Served) -> None:
    """vLLM's API server takes the picture for known to the engine, which has never seen it."""
    unseen = picture(64, 64, 9)
    SIZES[unseen], FILES[digest_of(unseen)] = (64, 64, "png"), unseen
    failed = await failure_of(served, served.job(START, unseen, END, *[5] * 200))
    assert failed.category is ErrorCategory.USER
    assert "maximum context length" in str(failed)
    before = served.client.counts["upstream_error"]
    assert (await served.sample(served.job(START, unseen, END, 5))).sequences[0].tokens
    assert served.client.counts["upstream_error"] == before


async def until_running(served: Served, count: int) -> None:
    end = time.monotonic() + 30
    while (found := await running(served)) != count:
        assert time.monotonic() < end, found
        await asyncio.sleep(0.02)


async def running(served: Served) -> float:
    text = (await served.http.get("/metrics")).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if "num_requests_running{" in line)


async def test_a_pause_freezes_a_sample_and_a_cancellation_ends_it_in_vllm(served: Served) -> None:
    job = served.job(*ONE, max_tokens=100)
    (await served.http.post("/pause", params={"mode": "keep"})).raise_for_status()
    kept, cancelled = (asyncio.create_task(served.sample(job)) for _ in range(2))
    await asyncio.sleep(0.5)
    assert not kept.done()
    cancelled.cancel()
    (await served.http.post("/resume")).raise_for_status()
    assert len((await kept).sequences[0].tokens) == 100
    await until_running(served, 0)
    long = asyncio.create_task(served.sample(served.job(*ONE, max_tokens=100, num_samples=64)))
    await until_running(served, 64)
    long.cancel()
    await until_running(served, 0)


TEXT = (5, 6, 7, 8, 9, 10)


async def test_text_is_computed_as_by_a_server_without_pictures(tmp_path: Path) -> None:
    path = make_seeing_model("qwen3-vl", tmp_path)
    answers = []
    for switch in ({}, {"language_model_only": True}):
        async with serving(path, tmp_path / f"server{len(answers)}", **switch) as served:
            assert ("--language-model-only" in served.spec.argv) == bool(switch)
            jobs = [
                served.job(*TEXT, prompt_logprobs=True, num_samples=2, seed=3),
                served.job(*TEXT, weights=ADAPTER, model=ADAPTER.name, prompt_logprobs=True, seed=3),
            ]
            answers.append([(await served.client.sample(job)).body for job in jobs])
            if switch:
                failed = await failure_of(served, served.job(*ONE))
                assert "At most 0 image(s)" in str(failed)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", ["qwen3-vl-moe", "qwen3.5 that sees", "qwen3.5-moe that sees"])
async def test_other_families_see(tmp_path: Path, family: str) -> None:
    """vLLM's kernels for CPUs compute Qwen3.5 in bfloat16 alone: logprobs of prompts with pictures have the error that
    logprobs of text have."""
    path = make_seeing_model(family, tmp_path, **MODELS[family][1])
    reference = Reference(path)
    as_released(family, Path(path))

    async def gaps(served: Served, parts: Sequence[int | bytes]) -> npt.NDArray[np.float32]:
        job = served.job(*parts, prompt_logprobs=True)
        tokens, found = whole(job, await served.sample(job))
        return np.abs(np.array(found, np.float32) - reference.logprobs(tokens, job.pictures, FILES))

    async with serving(path, tmp_path / "server") as served:
        rounded = served.spec.argv[served.spec.argv.index("--dtype") + 1] == "bfloat16"
        text = np.concatenate(
            [await gaps(served, np.random.default_rng(seed).integers(0, 120, 40).tolist()) for seed in range(4)]
        )
        seen = np.concatenate([await gaps(served, parts) for parts in (ONE, TWO)])
    for name, found in {"text": text, "pictures": seen}.items():
        print(f"{family}: gaps of logprobs of {name}: mean {found.mean():.1e}, largest {found.max():.1e}")
    assert seen.max() <= (EXACT if not rounded else 3 * text.max())
    assert seen.mean() <= (EXACT if not rounded else 2 * text.mean())
