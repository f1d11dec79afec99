"""The weights of a sample: adapters, whose missing files are fetched, full weights, which are refused with a reason,
and answers that other weights have begun, which are given to nobody."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from adapter_hosts import HostWithAllAdapters
from checkpoint_world import World, world_in
from engine_harness import files_in
from fake_upstream import FakeUpstream, Reply, complete, every_choice, fake_upstream
from sqlalchemy import update
from test_forwarding_failures import JOB

from skyrl.api.access import tenant_of_key
from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion, BaseWeights, FullWeights, WeightsRef
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.base.wire.results import to_json
from skyrl.http.client import HttpClient
from skyrl.sampling import retries
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.servers import FixedEndpoint
from skyrl.storage.db.adapter_versions import samplers
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.faults import DatabaseError
from skyrl.storage.db.full_weights import replaced_sentence
from skyrl.storage.db.futures import Outcome

FULL = FullWeights("step-7")
REFUSAL = "version 'step-7' of the full weights cannot be sampled from"


@pytest.fixture
async def world(tmp_path: Path, upstream: FakeUpstream) -> AsyncIterator[World]:
    async with world_in(tmp_path / "state", external_inference_url=upstream.url) as world:
        yield world


def sample_request(sampler: str, seq_id: int = 1) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    return {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt, "sampling_params": {"max_tokens": 2}}


async def sampled(world: World, sampler: str, seq_id: int = 1) -> Outcome:
    promise = await world.post("asample", sample_request(sampler, seq_id))
    outcome = await world.services.futures.wait(promise["request_id"], tenant_of_key("tml-one"), 60.0)
    assert outcome is not None
    return outcome


async def sampler_on(world: World, path: str) -> str:
    wanted = {"session_id": await world.session(), "sampling_session_seq_id": 0, "model_path": path}
    return (await world.post("create_sampling_session", wanted))["sampling_session_id"]


async def test_an_adapter_missing_in_vllm_and_on_disk_is_fetched_for_a_sample(
    world: World, upstream: FakeUpstream
) -> None:
    trainer = await world.trainer()
    path = (await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="kept"))["path"]
    sampler = await sampler_on(world, path)
    directory = world.harness.adapter(AdapterVersion.of(trainer.model_id, 1))
    files = files_in(directory)
    shutil.rmtree(world.harness.config.adapters_dir)
    upstream.adapters = set()
    assert (await sampled(world, sampler)).error is None
    assert [load.json["lora_path"] for load in upstream.loads] == [str(directory)]
    assert files_in(directory) == files != {}


async def test_samples_fail_if_the_adapters_files_are_lost(world: World, upstream: FakeUpstream) -> None:
    trainer = await world.trainer()
    saved = await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    await world.harness.copied()
    shutil.rmtree(world.harness.config.adapters_dir)
    upstream.adapters = set()
    failed = await sampled(world, saved["sampling_session_id"])
    name = f"{trainer.model_id}@1"
    assert failed.error_category == "server"
    assert failed.error == (
        f"the inference server lost adapter {name} and cannot load it again: the files of adapter {name} are gone"
    )
    assert upstream.loads == []


async def test_a_sample_of_weights_that_were_lost_with_the_power_says_to_save_again(
    world: World, upstream: FakeUpstream
) -> None:
    trainer = await world.trainer()
    saved = await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    directory = world.harness.adapter(AdapterVersion.of(trainer.model_id, 1))
    await world.harness.copied()
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "adapter_model.safetensors").symlink_to(directory / "gone")
    os.utime(directory, (0, 0))
    upstream.adapters = set()
    failed = await sampled(world, saved["sampling_session_id"])
    assert failed.error_category == "user"
    assert failed.error is not None
    assert failed.error.endswith("Save the weights again")
    assert upstream.loads == []


async def test_full_weights_are_refused_with_a_reason(world: World, upstream: FakeUpstream) -> None:
    trainer, database = await world.trainer(), world.harness.database
    path = (await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="all"))["path"]
    sampler = await sampler_on(world, path)
    world.services.samplers.forget_session(sampler.partition(":")[0])
    for table in (checkpoints, samplers):
        database.write(lambda c, table=table: c.execute(update(table).values(weights=FULL)))
    for route, body, field in (
        (
            "create_sampling_session",
            {"session_id": await world.session(), "sampling_session_seq_id": 1, "model_path": path},
            "model_path",
        ),
        ("asample", sample_request(sampler), "sampling_session_id"),
        ("copy_weights", {"source_path": path, "destination_project_id": "p"}, "source_path"),
    ):
        refused = await world.ask("POST", route, body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["field"] == field
        assert ("full weights" if route == "copy_weights" else REFUSAL) in refused.json()["detail"]
    assert upstream.completions == []


ONE, TWO = FullWeights("m@1"), FullWeights("m@2")
SAMPLE = msgspec.structs.replace(JOB, weights=ONE, version="m@1", num_samples=2)


class Current:
    """What the database says."""

    def __init__(self) -> None:
        self.weights: BaseWeights | FullWeights = ONE
        self.asked = 0
        self.away = 0
        """How often the database is away."""

    async def replaced(self, weights: WeightsRef) -> str | None:
        self.asked += 1
        if self.away:
            self.away -= 1
            raise DatabaseError("the database is away")
        return None if weights == self.weights else replaced_sentence(weights, self.weights)


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with fake_upstream() as server:
        yield server


@pytest.fixture
def current() -> Current:
    return Current()


@pytest.fixture
async def client(
    upstream: FakeUpstream, current: Current, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ForwardingClient]:
    monkeypatch.setattr(retries, "FIRST_BACKOFF_S", 0.001)
    made: Any = ForwardingClient(
        HttpClient(),
        FixedEndpoint(upstream.url),
        HostWithAllAdapters(),
        api_key="key",
        deadline_s=20.0,
        current_weights=current,  # type: ignore[arg-type]
    )
    yield made
    await made.close()


def by(*versions: str | None) -> Reply:
    """A whole answer whose sequences were begun by these versions."""

    def change(body: dict[str, Any]) -> None:
        for choice, version in zip(body["choices"], versions, strict=True):
            if version is not None:
                choice["weight_versions"] = [{"version": version, "start": 0, "end": 3}]

    return complete(change)


async def test_a_server_that_lacks_the_weights_is_asked_again(
    client: ForwardingClient, upstream: FakeUpstream, current: Current
) -> None:
    """It was started again, and has the base model's weights for a moment."""
    upstream.script.extend([by("default", "default"), by("default", "default"), by("m@1", "m@1")])
    answer = await client.sample(SAMPLE)
    assert (len(upstream.completions), current.asked) == (3, 2)
    assert client.counts["other_weights"] == 2
    sequences = pb.SampleResponse.FromString(answer.body).sequences
    assert [[span.version for span in sequence.weight_versions] for sequence in sequences] == [["m@1"], ["m@1"]]


async def test_a_sample_waits_while_nobody_knows_which_weights_are_current(
    client: ForwardingClient, upstream: FakeUpstream, current: Current
) -> None:
    current.away = 2
    upstream.script.extend([by("default", "default")] * 3 + [by("m@1", "m@1")])
    await client.sample(SAMPLE)
    assert (current.asked, client.counts["other_weights"]) == (3, 1)


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (TWO, "version 'm@1' was replaced by version 'm@2'"),
        (FullWeights("stranger@5"), "version 'm@1' was replaced by another model's weights"),
        (BaseWeights(), "version 'm@1' was replaced by the base model's weights, because its model has ended"),
    ],
)
async def test_a_sample_of_replaced_weights_fails_with_the_reason(
    client: ForwardingClient, upstream: FakeUpstream, current: Current, now: Any, reason: str
) -> None:
    current.weights = now
    upstream.script.extend([by("m@2", "m@2")])
    with pytest.raises(FailedRequest, match=reason) as failed:
        await client.sample(SAMPLE)
    assert failed.value.category is ErrorCategory.USER
    assert client.counts["replaced_weights"] == 1
    assert "stranger" not in failed.value.message


async def test_a_sample_that_its_weights_have_begun_is_whole_although_they_were_replaced(
    client: ForwardingClient, upstream: FakeUpstream, current: Current
) -> None:
    """The first sequence changed its weights after the first token, the second began after the change."""
    current.weights = TWO
    spans = [
        [{"version": "m@1", "start": 0, "end": 1}, {"version": "m@2", "start": 1, "end": 3}],
        [{"version": "m@2", "start": 0, "end": 3}],
    ]

    def change(body: dict[str, Any]) -> None:
        for choice, of_sequence in zip(body["choices"], spans, strict=True):
            choice["weight_versions"] = of_sequence

    upstream.script.extend([complete(change)])
    answer = await client.sample(SAMPLE)
    assert answer.changed_weights
    told = msgspec.json.decode(to_json(answer.body, "proto:sample"))
    assert [sequence["weight_versions"] for sequence in told["sequences"]] == spans
    assert current.asked == 0


async def test_an_answer_that_tells_no_version_is_given_to_nobody(
    client: ForwardingClient, upstream: FakeUpstream, current: Current
) -> None:
    upstream.script.extend([complete(every_choice(weight_versions=None))])
    with pytest.raises(FailedRequest, match="that the server did not tell") as failed:
        await client.sample(SAMPLE)
    assert failed.value.category is ErrorCategory.SERVER


async def test_samples_of_the_base_model_ask_for_its_version(
    client: ForwardingClient, upstream: FakeUpstream, current: Current
) -> None:
    base = msgspec.structs.replace(SAMPLE, weights=BaseWeights(), version="default")
    current.weights = BaseWeights()
    upstream.script.extend([by("m@1", "m@1"), by("default", "default")])
    await client.sample(base)
    current.weights = ONE
    upstream.script.extend([by("m@1", "m@1")])
    with pytest.raises(FailedRequest, match="the base model's weights were replaced by those of the model in training"):
        await client.sample(base)


async def test_servers_that_never_change_their_weights_are_not_asked_for_versions(
    client: ForwardingClient, upstream: FakeUpstream, current: Current
) -> None:
    upstream.script.extend([by("default", "default")])
    answer = await client.sample(msgspec.structs.replace(SAMPLE, version=None))
    assert not any(one.weight_versions for one in pb.SampleResponse.FromString(answer.body).sequences)
    assert current.asked == 0
