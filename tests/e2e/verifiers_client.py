"""The unmodified training client of verifiers at this server's route for token ids: prints the tokens of two turns.

Run in an isolated environment, as `python -m tests.e2e.verifiers_client URL MODEL TOKENIZER`; the key is in SKYRL_KEY.
"""

from __future__ import annotations

import asyncio
import json
import sys

from verifiers.v1.clients.train import TrainClient  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.client import TrainClientConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects import ChatDialect  # pyright: ignore[reportMissingImports]
from verifiers.v1.types import SamplingConfig  # pyright: ignore[reportMissingImports]


async def main(url: str, model: str, tokenizer: str) -> None:
    config = TrainClientConfig(base_url=f"{url}/v1", api_key_var="SKYRL_KEY", renderer_model_name=tokenizer)
    client = TrainClient(config)
    messages = [{"role": "user", "content": "Where is the fox?"}]
    sampling = SamplingConfig(temperature=1.0, top_p=1.0, max_tokens=6)
    for _ in range(2):
        response = await client.get_response(ChatDialect(), {"model": model, "messages": messages}, sampling)
        tokens, said = response.tokens, response.message.content or ""
        print(json.dumps([tokens.prompt_ids, tokens.completion_ids, tokens.completion_logprobs]))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
