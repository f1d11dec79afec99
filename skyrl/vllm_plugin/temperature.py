"""Lets vLLM sample at any finite temperature; its own bound is 2, and Tinker has none.

The bound is a check of requests alone, made in the API server and again in the engine; the sampler divides by
whatever the temperature is.
"""

from __future__ import annotations

from vllm.sampling_params import SamplingParams

VLLM_MAX = 2.0


def allow_any_temperature() -> None:
    """Patch this process; calling it again changes nothing."""
    original = SamplingParams._verify_args
    if original.__module__ == __name__:
        return

    def verify(params: SamplingParams) -> None:
        """vLLM's own checks, for a temperature that they do not object to."""
        temperature = params.temperature
        if not VLLM_MAX < temperature < float("inf"):
            return original(params)
        params.temperature = VLLM_MAX
        try:
            original(params)
        finally:
            params.temperature = temperature

    SamplingParams._verify_args = verify  # type: ignore[method-assign]
