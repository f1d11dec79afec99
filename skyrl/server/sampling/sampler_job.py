"""What follows from the sampling session of a request: the job, the name of the weights, and the usage that is counted.

Shared by the API process, which forwards samples, and the engine, which runs samples itself in `colocate_all`.
"""

from __future__ import annotations

from skyrl.base.pictures.picture import Pictures
from skyrl.base.types.weights import AdapterVersion, BaseWeights, FullWeights, WeightsRef, served_version
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.sample_request import SampleRequest
from skyrl.server.sampling.completion import SampleAnswer
from skyrl.server.sampling.job import ContextLimits, SampleJob, make_job
from skyrl.storage.db.samplers import Sampler
from skyrl.storage.db.usage import UsageKey, sample_amounts


def job_for(
    request: SampleRequest,
    request_id: str,
    sampler: Sampler,
    limits: ContextLimits,
    base_name: str,
    *,
    full_finetuning: bool = False,
    pictures: Pictures | None = None,
) -> SampleJob:
    """The job that samples from the weights of a sampling session. `base_name` is the inference servers' name for the
    base model. Raises RequestError naming the field."""
    model = served_name(sampler.weights, base_name, "sampling_session_id", full_finetuning=full_finetuning)
    return make_job(
        request,
        request_id=request_id,
        session_key=f"{sampler.id}:{request.seq_id}",
        model=model,
        weights=sampler.weights,
        limits=limits,
        version=served_version(sampler.weights) if full_finetuning else None,
        pictures=pictures,
    )


def served_name(weights: WeightsRef, base_name: str, field: str, *, full_finetuning: bool = False) -> str:
    """The name by which inference servers know these weights: full weights take the place of the base model. Raises
    RequestError naming `field` for weights that this server cannot sample from."""
    match weights:
        case BaseWeights():
            return base_name
        case AdapterVersion(name):
            if not full_finetuning:
                return name
            refused = f"adapter {name!r} cannot be sampled from: this server trains whole models, and has no adapters"
        case FullWeights(version):
            if full_finetuning:
                return base_name
            refused = (
                f"version {version!r} of the full weights cannot be sampled from: this server samples from the base "
                "model and from adapters"
            )
    raise RequestError(refused, field=field)


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
        again=answer.computed_again,
    )
