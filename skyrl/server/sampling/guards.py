"""Refuses requests that the inference server would refuse, or would answer with wrong numbers."""

from __future__ import annotations

from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.sample_request import SampleRequest
from skyrl.inference.features import InferenceFeatures
from skyrl.storage.db.samplers import Sampler

VLLM_MAX_TEMPERATURE = 2.0


class FeatureGuard:
    """Checks requests against the features of the inference server."""

    def __init__(self, features: InferenceFeatures) -> None:
        self._features = features

    def check(self, request: SampleRequest, sampler: Sampler) -> None:
        """Raises RequestError naming the field."""
        if not self._features.prompt_scores:
            for field in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
                if getattr(request, field):
                    raise RequestError(
                        "needs skyrl's plugin in vLLM on a CPU; this inference server does not have it", field=field
                    )
        temperature = request.sampling_params.temperature
        if temperature > VLLM_MAX_TEMPERATURE and not self._features.any_temperature:
            raise RequestError(
                f"must be in [0, {VLLM_MAX_TEMPERATURE:g}] with this inference server, got {temperature}",
                field="sampling_params.temperature",
            )
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            self.check_prompt_logprobs(sampler.adapts_unembed)

    def check_prompt_logprobs(self, adapts_unembed: bool) -> None:
        """A request for logprobs of the prompt. `adapts_unembed`: from an adapter that trains the unembedding."""
        if adapts_unembed and not self._features.unembed_prompt_logprobs:
            # On a GPU vLLM prepares its LoRA kernels for one row of logits per request. It leaves the adapter's lm_head
            # out of most rows of the prompt. Sampled logprobs are right. On a CPU the plugin corrects the same fault.
            raise RequestError(
                "vLLM computes them wrongly on a GPU for adapters that train the unembedding; create the model with "
                "train_unembed=False to have them",
                field="prompt_logprobs",
            )
