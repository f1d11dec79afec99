"""Lets vLLM sample at any finite temperature. vLLM's own bound is 2; Tinker has none.

Only the checks of requests in the API server and in the engine have the bound; the sampler divides by any temperature.
"""

from __future__ import annotations

from vllm.sampling_params import SamplingParams

VLLM_MAX = 2.0


def allow_any_temperature() -> None:
    """Patch this process. A second call changes nothing."""
    original = SamplingParams._verify_args
    if original.__module__ == __name__:
        return

    def verify(params: SamplingParams) -> None:
        """Run vLLM's own checks with a temperature that they allow."""
        temperature = params.temperature
        if not VLLM_MAX < temperature < float("inf"):
            return original(params)
        params.temperature = VLLM_MAX
        try:
            original(params)
        finally:
            params.temperature = temperature

    SamplingParams._verify_args = verify  # type: ignore[method-assign]
