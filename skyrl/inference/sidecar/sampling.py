"""One sample: sends it to vLLM, and collects what comes back, until vLLM has ended it or an abort has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl.inference.sidecar.completion import Collected
from skyrl.inference.sidecar.errors import BadRequest, Refused, VllmBroke
from skyrl.inference.sidecar.facts import Facts
from skyrl.inference.sidecar.generate_request import CUSTOM, DEFAULT_NEW_TOKENS, KEPT, GenerateRequest, Prompt
from skyrl.inference.sidecar.in_flight import InFlight, Sample
from skyrl.inference.sidecar.pictures import PATH as GENERATE
from skyrl.inference.sidecar.pictures import PlacedPictures, as_completion, generate_body
from skyrl.inference.sidecar.vllm import COMPLETIONS, Vllm


@dataclass(slots=True)
class Job:
    """One of the samples of a prompt. `tokens` are the prompt's, of which each picture has as many as it takes."""

    request: GenerateRequest
    prompt: Prompt
    tokens: list[int]
    child: int
    new_tokens: int
    sample: Sample
    facts: Facts
    pictures: PlacedPictures | None = None

    @property
    def scoring(self) -> bool:
        """The client wants the prompt's logprobs and no tokens. vLLM must sample one; it is thrown away."""
        return self.new_tokens == 0

    @property
    def prompt_logprobs(self) -> bool:
        wanted = self.prompt.logprobs
        return wanted is not None and 0 <= wanted.start < len(self.tokens)

    @property
    def only_whole(self) -> bool:
        """What vLLM's streams do not have."""
        return self.scoring or self.prompt_logprobs or self.request.routed_experts_start is not None

    def body(self, stream: bool) -> dict[str, Any]:
        """The request to vLLM."""
        prompt = self.prompt
        sampling, wanted = prompt.sampling, prompt.logprobs
        body = sampling.fields | prompt.extra
        body |= {
            "model": prompt.adapter or self.facts.model,
            "prompt": self.tokens,
            "max_tokens": max(1, self.new_tokens),
            "n": 1,
            "return_token_ids": True,
        }
        if self.scoring:
            body |= {"min_tokens": 0, "stop": []}
        if (seed := sampling.seed_of(self.child)) is not None:
            body["seed"] = seed
        if wanted is not None:
            top = 1 if wanted.ids else max(wanted.top, sampling.kept)
            body |= {"logprobs": top, "return_tokens_as_token_ids": True}
            if wanted.ids:
                body["logprob_token_ids"] = list(wanted.ids)
            if self.prompt_logprobs:
                body["prompt_logprobs"] = wanted.top
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


def new_tokens(prompt: Prompt, tokens: int, context: int) -> int:
    """How many tokens to sample after a prompt of `tokens` tokens. Raises BadRequest, with SGLang's words, if prompt
    and tokens do not fit in the context. Only the default number is shortened."""
    if tokens >= context:
        raise BadRequest(f"The input ({tokens} tokens) is longer than the model's context length ({context} tokens).")
    start = -1 if prompt.logprobs is None else prompt.logprobs.start
    if start > tokens:
        raise BadRequest(f"logprob_start_len: must be at most the number of prompt tokens ({tokens}), got {start}")
    skipped = prompt.extra.get("routed_experts_prompt_start", 0)
    if skipped > tokens:
        raise BadRequest(f"routed_experts_start_len: must be at most the number of prompt tokens ({tokens})")
    wanted = prompt.sampling.max_new_tokens
    if wanted is None:
        return max(1, min(DEFAULT_NEW_TOKENS, context - tokens - 1))
    if wanted and tokens + wanted >= context:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {tokens + wanted} tokens: {tokens} tokens from the input messages and {wanted} tokens for the "
            "completion."
        )
    return wanted


async def collect(job: Job, vllm: Vllm, in_flight: InFlight, collected: Collected, changed: Callable[[], None]) -> None:
    """Wait while generation is paused. Then fill `collected`, and call `changed` each time that it has more, until vLLM
    or an abort has ended the sample. Cancelling closes the connection to vLLM, and vLLM then ends the sample. Raises
    SidecarError."""
    sample = job.sample
    if not await in_flight.send(sample):
        return
    streams = not job.only_whole and (job.request.stream or not job.facts.dev_mode)
    reading = asyncio.ensure_future(_sample(job, vllm, collected, changed, streams=streams))
    given_up = asyncio.ensure_future(sample.given_up.wait())
    try:
        await asyncio.wait({reading, given_up}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
    except Refused as error:
        if error.param == "logprobs" and job.prompt.sampling.kept:
            hint = (
                HINTS["logprobs"] if job.prompt.logprobs and job.prompt.logprobs.top < job.prompt.sampling.kept else ""
            )
            raise BadRequest(f"sampling_params.{CUSTOM}.{KEPT}: {error.message}{hint}") from error
        raise named(error) from error
    finally:
        reading.cancel()
        given_up.cancel()
        await asyncio.wait({reading, given_up})
    if collected.finish is None and not sample.aborted.is_set():
        raise VllmBroke("vLLM's stream ended without a finish_reason")
    if collected.prompt_tokens not in (None, len(job.tokens)):
        raise VllmBroke(f"vLLM counts {collected.prompt_tokens} prompt tokens, {len(job.tokens)} were sent")


THEIR_NAMES = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
    "model": "lora_path",
    "prompt": "input_ids",
    "input_tokens": "input_ids",
    "seed": "sampling_params.sampling_seed",
    "include_stop_str_in_output": "sampling_params.no_stop_trim",
    "structured_outputs": "sampling_params",
    "routed_experts_prompt_start": "routed_experts_start_len",
}
"""vLLM's names of fields that the client knows by another name."""
HINTS = {
    "stop": " (VLLM_MAX_STOP_STRINGS sets how many vLLM takes)",
    "logprobs": " (--max-logprobs sets how many vLLM gives)",
    "prompt_logprobs": " (--max-logprobs sets how many vLLM gives)",
    "priority": " (--scheduling-policy priority makes vLLM take priorities)",
}
_OUTSIDE = ("priority", "cache_salt", "session_id")


def named(error: Refused) -> BadRequest:
    """The error with the name that the client knows the field by."""
    param = error.param
    if param is None and "vocabulary" in error.message:
        param = "prompt"
    if param is None:
        return error
    own = THEIR_NAMES.get(param) or (param if param in _OUTSIDE else f"sampling_params.{param}")
    return BadRequest(f"{own}: {error.message}{HINTS.get(param, '')}")


async def _sample(job: Job, vllm: Vllm, collected: Collected, changed: Callable[[], None], *, streams: bool) -> None:
    body, path, pictures = job.body(streams), COMPLETIONS, job.pictures
    if pictures is not None:
        body, path = generate_body(body, pictures), GENERATE
    logprobs = job.prompt.logprobs is not None
    if streams:
        async for chunk in vllm.stream(body, job.sample.request_id, path):
            one = chunk if pictures is None else as_completion(chunk, job.tokens, chunk=True)
            collected.add_chunk(one, logprobs=logprobs)
            changed()
        return
    answer = await vllm.complete(body, job.sample.request_id, path)
    if pictures is not None:
        answer = as_completion(answer, job.tokens, chunk=False)
    collected.add_answer(answer, logprobs=logprobs, prompt=job.tokens if job.prompt_logprobs else None)
    changed()
