"""Prompt logprobs that a GPU's vLLM would get wrong are refused, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl.db.samplers import Sampler
from skyrl.sampling.guards import UnembedGuard
from skyrl.wire.errors import RequestError
from skyrl.wire.requests import Chunk, ModelInput, SampleRequest

PROMPT = ModelInput([Chunk(tokens=[1, 2])])


def sampler(directory: Path | None, *targets: str) -> Sampler:
    if directory is not None:
        (directory / "adapter_config.json").write_text(json.dumps({"target_modules": list(targets)}))
    name = None if directory is None else "m@1"
    return Sampler("s:sample:0", "s", "tenant", "tiny", None, name, None if directory is None else str(directory))


@pytest.mark.parametrize(
    "request_",
    [
        SampleRequest(prompt=PROMPT, prompt_logprobs=True),
        SampleRequest(prompt=PROMPT, topk_prompt_logprobs=1),
        SampleRequest(prompt=PROMPT, prompt_logprobs_last_n=1),
    ],
)
def test_prompt_logprobs_of_an_unembedding_adapter_are_refused_on_a_gpu(
    tmp_path: Path, request_: SampleRequest
) -> None:
    with pytest.raises(RequestError) as refused:
        UnembedGuard(enabled=True).check(request_, sampler(tmp_path, "q_proj", "lm_head"))
    assert refused.value.field == "prompt_logprobs"


def test_everything_else_passes(tmp_path: Path) -> None:
    wanted, plain = SampleRequest(prompt=PROMPT, prompt_logprobs=True), SampleRequest(prompt=PROMPT)
    trained = sampler(tmp_path, "q_proj", "lm_head")
    UnembedGuard(enabled=False).check(wanted, trained)
    UnembedGuard(enabled=True).check(plain, trained)
    UnembedGuard(enabled=True).check(wanted, sampler(None))
    UnembedGuard(enabled=True).check(wanted, sampler(tmp_path, "q_proj", "down_proj"))
