"""Requests that the inference server would answer with wrong numbers, refused before it can."""

from __future__ import annotations

import json
from pathlib import Path

from skyrl.db.samplers import Sampler
from skyrl.wire.errors import RequestError
from skyrl.wire.requests import SampleRequest


class UnembedGuard:
    """On GPUs vLLM 0.32 leaves an adapter's lm_head out of most prompt logprobs, and says nothing.

    Its LoRA kernels are prepared for one logits row per request, not for the prompt's rows (on CPUs the plugin of
    skyrl mends the same fault). Sampled logprobs are right. With `enabled`, prompt logprobs of an adapter that trained
    its unembedding are refused.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._trains_unembed: dict[str, bool] = {}

    def check(self, request: SampleRequest, sampler: Sampler) -> None:
        """Raises RequestError naming prompt_logprobs. Reads the adapter's configuration once."""
        wanted = request.prompt_logprobs or request.topk_prompt_logprobs or request.prompt_logprobs_last_n is not None
        if not self._enabled or not wanted or sampler.adapter_path is None:
            return
        trains = self._trains_unembed.get(sampler.adapter_path)
        if trains is None:
            adapter = json.loads((Path(sampler.adapter_path) / "adapter_config.json").read_text())
            trains = self._trains_unembed[sampler.adapter_path] = "lm_head" in adapter["target_modules"]
        if trains:
            raise RequestError(
                "vLLM computes them wrongly on a GPU for adapters that train the unembedding; create the model with "
                "train_unembed=False to have them",
                field="prompt_logprobs",
            )
