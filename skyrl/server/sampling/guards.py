"""Refuses requests that the inference server would refuse, or would answer with wrong numbers."""

from __future__ import annotations

from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.sample_request import SampleRequest
from skyrl.inference.features import InferenceFeatures

VLLM_MAX_TEMPERATURE = 2.0


class FeatureGuard:
    """Checks requests against the features of the inference server."""

    def __init__(self, features: InferenceFeatures) -> None:
        self._features = features

    def check(self, request: SampleRequest) -> None:
        """Raises RequestError naming the field."""
        if not self._features.prompt_scores:
            for field in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
                if getattr(request, field):
                    raise RequestError(
                        "needs skyrl's plugin in vLLM; this inference server does not have it", field=field
                    )
        temperature = request.sampling_params.temperature
        if temperature > VLLM_MAX_TEMPERATURE and not self._features.any_temperature:
            raise RequestError(
                f"must be in [0, {VLLM_MAX_TEMPERATURE:g}] with this inference server, got {temperature}",
                field="sampling_params.temperature",
            )
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            self.check_prompt_logprobs()

    def check_prompt_logprobs(self) -> None:
        """A request for logprobs of the prompt. Raises RequestError."""
        if not self._features.prompt_logprobs:
            raise RequestError(
                "needs skyrl's plugin in vLLM, without which vLLM may compute them with another adapter; the operator "
                "can install a version of vLLM that the plugin is for",
                field="prompt_logprobs",
            )
