"""Requests that the inference server cannot answer, or would answer with wrong numbers, refused before it gets them."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from skyrl.db.samplers import Sampler
from skyrl.inference.features import InferenceFeatures
from skyrl.wire.errors import NotFound, RequestError
from skyrl.wire.requests import SampleRequest

VLLM_MAX_TEMPERATURE = 2.0


class FeatureGuard:
    """Checks requests against what the inference server can do."""

    def __init__(self, features: InferenceFeatures) -> None:
        self._features = features

    def check(self, request: SampleRequest, sampler: Sampler, state_dir: Path) -> None:
        """Raises RequestError naming the field. Reads an adapter's configuration, in the state directory, where that
        decides."""
        if not self._features.prompt_scores:
            for field in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
                if getattr(request, field):
                    raise RequestError(
                        "needs skyrl's plugin in vLLM on a CPU, which this inference server is not", field=field
                    )
        temperature = request.sampling_params.temperature
        if temperature > VLLM_MAX_TEMPERATURE and not self._features.any_temperature:
            raise RequestError(
                f"must be in [0, {VLLM_MAX_TEMPERATURE:g}] with this inference server, got {temperature}",
                field="sampling_params.temperature",
            )
        wants_prompt_logprobs = request.prompt_logprobs or request.topk_prompt_logprobs
        if wants_prompt_logprobs and not self._features.unembed_prompt_logprobs and _has_unembed(sampler, state_dir):
            # vLLM's LoRA kernels on GPUs are prepared for one row of logits per request, not for the prompt's rows,
            # and leave lm_head out of most. Sampled logprobs are right; on a CPU the plugin mends the same fault.
            raise RequestError(
                "vLLM computes them wrongly on a GPU for adapters that train the unembedding; create the model with "
                "train_unembed=False to have them",
                field="prompt_logprobs",
            )


def _has_unembed(sampler: Sampler, state_dir: Path) -> bool:
    """Raises NotFound when the adapter's files are gone."""
    if sampler.adapter_path is None:
        return False
    try:
        return _trains_unembed(state_dir / sampler.adapter_path)
    except FileNotFoundError as error:
        raise NotFound(f"the weights of {sampler.id!r} are gone", field="sampling_session_id") from error


@lru_cache(maxsize=10_000)
def _trains_unembed(adapter_path: Path) -> bool:
    adapter = json.loads((adapter_path / "adapter_config.json").read_text())
    return "lm_head" in adapter["target_modules"]
