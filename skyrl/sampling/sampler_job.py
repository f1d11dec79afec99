"""What follows from the sampling session of a request: the job, the name of the weights, and the usage that is counted.

Shared by the API process, which forwards samples, and the engine, which runs samples itself in `colocate_all`.
"""

from __future__ import annotations

from skyrl.db.samplers import Sampler
from skyrl.db.usage import UsageKey, sample_amounts
from skyrl.sampling.completion import SampleAnswer
from skyrl.sampling.job import ContextLimits, SampleJob, make_job
from skyrl.types.weights import AdapterVersion, BaseWeights, FullWeights, WeightsRef
from skyrl.wire.errors import RequestError
from skyrl.wire.sample_request import SampleRequest


def job_for(
    request: SampleRequest, request_id: str, sampler: Sampler, limits: ContextLimits, base_name: str
) -> SampleJob:
    """The job that samples from the weights of a sampling session. `base_name` is the inference servers' name for the
    base model. Raises RequestError naming the field."""
    return make_job(
        request,
        request_id=request_id,
        session_key=f"{sampler.id}:{request.seq_id}",
        model=served_name(sampler.weights, base_name, "sampling_session_id"),
        weights=sampler.weights,
        limits=limits,
    )


def served_name(weights: WeightsRef, base_name: str, field: str) -> str:
    """The name by which inference servers know these weights. Raises RequestError naming `field` for weights that this
    server cannot sample from."""
    match weights:
        case BaseWeights():
            return base_name
        case AdapterVersion(name):
            return name
        case FullWeights(version):
            raise RequestError(
                f"version {version!r} of the full weights cannot be sampled from: this server samples from the base "
                "model and from adapters",
                field=field,
            )


def usage_of(answer: SampleAnswer, sampler: Sampler) -> dict[UsageKey, int]:
    """The amounts that a sample adds to the usage of its tenant."""
    return sample_amounts(
        sampler.tenant,
        sampler.session_id,
        sampler.base_model,
        sampler.weights,
        prompt=answer.prompt_tokens,
        cached=answer.cached_tokens,
        sampled=answer.sampled_tokens,
    )
