"""Only requests that the inference server cannot answer, or would answer wrongly, are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyrl.base.types.weights import AdapterVersion, BaseWeights
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.sample_request import Chunk, ModelInput, SampleRequest, SamplingParams
from skyrl.base.wire.tensors import JsonTensor
from skyrl.inference.features import InferenceFeatures
from skyrl.server.sampling.guards import FeatureGuard
from skyrl.storage.db.samplers import Sampler

PROMPT = ModelInput([Chunk(tokens=[1, 2])])
ALL = InferenceFeatures(prompt_scores=True, any_temperature=True, unembed_prompt_logprobs=True)
PLAIN = SampleRequest(prompt=PROMPT)
SCORED = SampleRequest(prompt=PROMPT, prompt_logprobs=True)
TARGET = SampleRequest(prompt=PROMPT, target_prompt_logprobs=JsonTensor([1], "int64", [1, 1]))
DRAWN = SampleRequest(prompt=PROMPT, prompt_alt_tokens_k=1)
HOT = SampleRequest(prompt=PROMPT, sampling_params=SamplingParams(temperature=2.5))


BASE = Sampler("s:sample:0", "s", "tenant", "tiny", None, BaseWeights())
UNEMBED = replace(BASE, weights=AdapterVersion("m@1"), adapts_unembed=True)
ATTENTION = replace(BASE, weights=AdapterVersion("m@2"))


def refused(features: InferenceFeatures, request: SampleRequest, sampler: Sampler) -> RequestError:
    with pytest.raises(RequestError) as caught:
        FeatureGuard(features).check(request, sampler)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("request_", [SCORED, SampleRequest(prompt=PROMPT, topk_prompt_logprobs=1)])
def test_prompt_logprobs_of_an_unembedding_adapter_are_refused_where_they_are_wrong(
    request_: SampleRequest,
) -> None:
    features = replace(ALL, unembed_prompt_logprobs=False)
    assert refused(features, request_, UNEMBED).field == "prompt_logprobs"


def test_prompt_logprobs_of_other_weights_are_accepted() -> None:
    FeatureGuard(ALL).check(SCORED, UNEMBED)
    guard = FeatureGuard(replace(ALL, unembed_prompt_logprobs=False))
    guard.check(PLAIN, UNEMBED)
    guard.check(SCORED, BASE)
    guard.check(SCORED, ATTENTION)


@pytest.mark.parametrize(("request_", "field"), [(TARGET, "target_prompt_logprobs"), (DRAWN, "prompt_alt_tokens_k")])
def test_scores_of_the_plugin_are_refused_without_the_plugin(request_: SampleRequest, field: str) -> None:
    features = replace(ALL, prompt_scores=False)
    assert refused(features, request_, BASE).field == field
    FeatureGuard(ALL).check(request_, BASE)
    FeatureGuard(features).check(SCORED, BASE)


def test_without_the_plugin_temperatures_above_two_are_refused() -> None:
    features = replace(ALL, any_temperature=False)
    assert refused(features, HOT, BASE).field == "sampling_params.temperature"
    FeatureGuard(ALL).check(HOT, BASE)
    FeatureGuard(features).check(SampleRequest(prompt=PROMPT, sampling_params=SamplingParams(temperature=2.0)), BASE)
