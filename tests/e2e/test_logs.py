"""No key, no prompt, no sampled text and no signed link is in any log of the real server."""

from __future__ import annotations

import contextlib
import re
import secrets

import httpx
import tinker
from transformers import PreTrainedTokenizerBase

from skyrl.cli.demo.server import DemoServer

from .conftest import ALIAS, ClientFactory, cross_entropy

MARKER = "zebras cross the quiet river"
TOKENS = [401, 402, 403, 404]


def test_nothing_secret_is_logged(
    server: DemoServer, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    key = f"tml-very-secret-{secrets.token_hex(16)}"
    client = connect(key)
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    trainer.forward_backward([cross_entropy(TOKENS)], "cross_entropy").result()
    path = trainer.save_weights_for_sampler("secret-logs").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    params = tinker.SamplingParams(max_tokens=8, temperature=0.0)
    sampler.sample(tinker.ModelInput.from_ints(TOKENS), 1, params).result()
    with contextlib.suppress(Exception):  # a pass whose content is wrong fails when its turn comes
        trainer.forward_backward([cross_entropy(TOKENS)], "no_such_loss").result()  # type: ignore[arg-type]
    headers = {"X-API-Key": key, "X-Request-Id": "find-me-in-the-logs"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as http:
        checkpoint = f"/api/v1/training_runs/{path.split('/')[2]}/checkpoints/{'/'.join(path.split('/')[3:])}"
        link = http.get(f"{checkpoint}/archive", follow_redirects=False).headers["location"]
        assert http.get(link).status_code == 200
        assert http.get(link.replace("signature=", "signature=0")).status_code == 403
        said = http.post("/v1/completions", json={"model": ALIAS, "prompt": MARKER, "max_tokens": 8, "temperature": 0})
        assert said.status_code == 200, said.text
        for body in (
            {"model": ALIAS, "prompt": MARKER, "max_tokens": -1},
            {"model": ALIAS, "prompt": {"text": MARKER}},
        ):
            assert http.post("/v1/completions", json=body).status_code == 400
        assert http.post("/api/v1/asample", content=f'{{"prompt": "{MARKER}'.encode()).status_code == 400
        assert http.post("/api/v1/asample", json={"sampling_session_id": 5, "prompt": MARKER}).status_code == 400
    sampled = said.json()["choices"][0]["text"]
    logs = {file.name: file.read_text(errors="replace") for file in (server.state_dir / "logs").iterdir()}
    logs["serve.log"] = (server.state_dir / "serve.log").read_text(errors="replace")
    assert "find-me-in-the-logs" in logs["api.log"], "refusals are logged, with their ids"
    signature = link.partition("signature=")[2].partition("&")[0]
    assert len(signature) > 20
    for name, text in logs.items():
        for secret in (key, key[4:24], signature, MARKER, sampled if len(sampled) > 8 else MARKER):
            assert secret not in text, name
        assert not re.search(r"401,\s*402,\s*403", text), f"{name}: the prompt's tokens"
