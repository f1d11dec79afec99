"""Only requests that the inference server cannot answer, or would answer wrongly, are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.sample_request import Chunk, ModelInput, SampleRequest, SamplingParams
from skyrl.base.wire.tensors import JsonTensor
from skyrl.inference.features import InferenceFeatures
from skyrl.sampling.job import FeatureGuard

PROMPT = ModelInput([Chunk(tokens=[1, 2])])
ALL = InferenceFeatures(prompt_logprobs=True, prompt_scores=True, any_temperature=True)
PLAIN = SampleRequest(prompt=PROMPT)
SCORED = SampleRequest(prompt=PROMPT, prompt_logprobs=True)
TARGET = SampleRequest(prompt=PROMPT, target_prompt_logprobs=JsonTensor([1], "int64", [1, 1]))
DRAWN = SampleRequest(prompt=PROMPT, prompt_alt_tokens_k=1)
HOT = SampleRequest(prompt=PROMPT, sampling_params=SamplingParams(temperature=2.5))


def refused(features: InferenceFeatures, request: SampleRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        FeatureGuard(features).check(request)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("request_", [SCORED, SampleRequest(prompt=PROMPT, topk_prompt_logprobs=1)])
def test_prompt_logprobs_are_refused_where_they_may_be_wrong(request_: SampleRequest) -> None:
    features = replace(ALL, prompt_logprobs=False)
    assert refused(features, request_).field == "prompt_logprobs"
    FeatureGuard(ALL).check(request_)
    FeatureGuard(features).check(PLAIN)


@pytest.mark.parametrize(("request_", "field"), [(TARGET, "target_prompt_logprobs"), (DRAWN, "prompt_alt_tokens_k")])
def test_scores_of_the_plugin_are_refused_without_the_plugin(request_: SampleRequest, field: str) -> None:
    features = replace(ALL, prompt_scores=False)
    assert refused(features, request_).field == field
    FeatureGuard(ALL).check(request_)
    FeatureGuard(features).check(SCORED)


def test_without_the_plugin_temperatures_above_two_are_refused() -> None:
    features = replace(ALL, any_temperature=False)
    assert refused(features, HOT).field == "sampling_params.temperature"
    FeatureGuard(ALL).check(HOT)
    FeatureGuard(features).check(SampleRequest(prompt=PROMPT, sampling_params=SamplingParams(temperature=2.0)))
