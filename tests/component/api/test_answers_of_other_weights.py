"""Answers that other weights have begun than the ones that a sample asked for are given to nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from adapter_hosts import HostWithAllAdapters
from fake_upstream import FakeUpstream, Reply, complete, every_choice, fake_upstream
from test_forwarding_failures import JOB

from skyrl.base.types.weights import BaseWeights, FullWeights, WeightsRef
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.base.wire.results import to_json
from skyrl.http.client import HttpClient
from skyrl.sampling import retries
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.servers import FixedEndpoint
from skyrl.storage.db.faults import DatabaseError
from skyrl.storage.db.full_weights import replaced_sentence

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
