"""Which requests ask the inference server for tokens without text."""

from __future__ import annotations

from api_harness import Api, tokens
from fake_upstream import FakeUpstream
from openai_requests import PROMPT, ask

from skyrl.vllm_plugin.tokens_header import TOKENS_ONLY


async def test_a_sample_asks_for_tokens_alone(api: Api, upstream: FakeUpstream) -> None:
    promise = await api.sample(await api.sampler(), 1)
    assert tokens(await api.result(promise["request_id"]))
    (sent,) = upstream.completions
    assert TOKENS_ONLY in sent.headers


async def test_an_openai_request_asks_for_text_too(api: Api, upstream: FakeUpstream) -> None:
    assert (await ask(api, PROMPT)).status_code == 200
    assert upstream.completions
    assert all(TOKENS_ONLY not in sent.headers for sent in upstream.completions)
