"""Exports: the server gives adapters to users as files."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any
from urllib.request import urlopen

from ..catalogue import feature
from ..user import WAIT_S, User, both, wait

GROUP = "Exports"
RECIPIENT = "age1d6gggfdz94k5w6r858vyzqc9ywzxhdkwuf5eu8fe3e7swvm5cvlsuksn35"
"""An age recipient; the project does not have the secret key."""


def fetch(url: str) -> bytes:
    """Download a file by its link, without key and headers."""
    with urlopen(url, timeout=WAIT_S) as answer:
        return answer.read()


def check_adapter(files: dict[str, Any], rank: int) -> None:
    config = json.loads(files["adapter_config.json"])
    assert config["r"] == rank
    assert config["lora_alpha"] == 32
    weights = files["adapter_model.safetensors"]
    header = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
    names = header.keys() - {"__metadata__"}
    assert names
    assert all(name.startswith("base_model.model.") for name in names)
    assert {name.rsplit(".", 2)[1] for name in names} == {"lora_A", "lora_B"}


@feature(
    GROUP,
    "The archive of a sampler checkpoint downloads and holds a PEFT adapter.",
    needs=("RestClient.get_checkpoint_archive_url",),
)
def checkpoint_archive(user: User) -> None:
    trainer = user.train(rank=3)
    user.step(trainer)
    path = wait(trainer.save_weights_for_sampler("for-download")).path
    run = user.model_id(trainer)
    answers = both(user.rest, "get_checkpoint_archive_url", run, "sampler_weights/for-download")
    answers += both(user.rest, "get_checkpoint_archive_url_from_tinker_path", path)
    for answer in answers:
        with tarfile.open(fileobj=io.BytesIO(fetch(answer.url))) as tar:
            files = {member.name: tar.extractfile(member) for member in tar.getmembers() if member.isfile()}
            contents = {name.removeprefix("./"): file.read() for name, file in files.items() if file}
        check_adapter(contents, rank=3)
        assert "checkpoint_complete" in contents


@feature(
    GROUP,
    "`save_weights_external` and the links to its files: a PEFT adapter.",
    needs=("TrainingClient.save_weights_external", "RestClient.get_external_weights_urls"),
)
def external_weights(user: User) -> None:
    trainer = user.train(rank=3)
    user.step(trainer)
    first = wait(trainer.save_weights_external("out")).path
    second = wait(trainer.save_weights_external_async("again", ttl_seconds=3600)).path
    for path in (first, second):
        for answer in both(user.rest, "get_external_weights_urls", path):
            assert answer.expires.tzinfo is not None
            check_adapter({name: fetch(url) for name, url in answer.urls.items()}, rank=3)
    kinds = {
        c.tinker_path: c.checkpoint_type for c in wait(user.rest.list_checkpoints(user.model_id(trainer))).checkpoints
    }
    assert kinds == {first: "external", second: "external"}
    wait(user.rest.delete_checkpoint_from_tinker_path(first))


@feature(
    GROUP,
    "External weights encrypted for an age recipient.",
    needs=("TrainingClient.save_weights_external(age_encryption_recipients)",),
)
def encrypted_external_weights(user: User) -> None:
    trainer = user.train()
    path = wait(trainer.save_weights_external("secret", age_encryption_recipients=[RECIPIENT])).path
    urls = wait(user.rest.get_external_weights_urls(path)).urls
    assert {"adapter_config.json.age", "adapter_model.safetensors.age"} <= urls.keys()
    for url in urls.values():
        assert fetch(url).startswith(b"age-encryption.org/v1\n")
