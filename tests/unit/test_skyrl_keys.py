"""An operator's configuration and flags from SkyRL: taken, under another name here, or refused with the reason.

The page "Coming from SkyRL" has a row for each; when they differ, the test prints the rows that the page should have.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from skyrl.cli.main import app
from skyrl.cli.skyrl_flags import own_flags
from skyrl.config import skyrl_keys
from skyrl.config.backend import BackendConfig, ConfigError, known_keys, parse_backend_config
from skyrl.config.loading import load_config
from skyrl.config.skyrl_keys import BACKENDS, ENGINE_OPTIONS, FAMILIES, FLAGS, KEYS, OLD_NAMES, Entry

PAGE = Path(__file__).parents[2] / "docs/operating/coming-from-skyrl.md"
OPERATORS = {
    "trainer.placement.colocate_all": False,
    "trainer.policy.megatron_config.lora_config.merge_lora": False,
    "trainer.policy.model.lora.max_loras": 4,
    "trainer.policy.model.lora.max_cpu_loras": 8,
}
"""What SkyRL's page on many tenants tells operators to give."""
BECOMES = {key: entry.becomes for key, entry in KEYS.items() if entry.becomes}
SAMPLE_VALUES: dict[str, Any] = {
    "trainer.micro_batch_tokens": 64,
    "trainer.gradient_checkpointing": True,
    "trainer.policy.model.lora.max_lora_rank": 8,
    "generator.inference_engine.max_num_seqs": 3,
}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SKYRL_")]:
        monkeypatch.delenv(name)


def value_at(config: BackendConfig, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config({"backend_config": given})
    return str(raised.value)


def test_an_operators_configuration_works_as_it_is() -> None:
    for given in (OPERATORS, json.dumps(OPERATORS)):
        config = load_config({"backend_config": given}).backend_config
        assert (config.lora.max_loras, config.lora.max_cpu_loras) == (4, 8)
        assert config.trainer.placement.colocate_all is False


def test_serve_takes_it_too(tmp_path: Path) -> None:
    """The port is what this start ends at, so that everything before it was accepted."""
    flags = ["--backend", "fsdp2", "--checkpoints-base", str(tmp_path), "--no-use-ray", "--port", "0"]
    done = CliRunner().invoke(app, ["serve", "--backend-config", json.dumps(OPERATORS), *flags])
    assert done.exit_code == 2
    assert done.stderr.startswith("skyrl serve: port: Input should be greater than or equal to 1")
    other = json.dumps(OPERATORS | {"trainer.policy.megatron_config.lora_config.merge_lora": True})
    done = CliRunner().invoke(app, ["serve", "--backend-config", other, *flags])
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert "lora_config.merge_lora' cannot be True: adapters are never merged" in done.stderr


@pytest.mark.parametrize("key", [key for key, entry in KEYS.items() if entry.takes])
def test_what_this_server_does_anyway_is_taken_and_anything_else_refused(key: str) -> None:
    for value in KEYS[key].takes:
        assert parse_backend_config({key: value}) == BackendConfig()
    assert refusal({key: "other"}) == f"backend_config: '{key}' cannot be 'other': {KEYS[key].why}"


def test_one_is_not_true() -> None:
    assert "num_engines' cannot be True" in refusal({"generator.inference_engine.num_engines": True})
    assert "merge_lora' cannot be 0" in refusal({"trainer.policy.megatron_config.lora_config.merge_lora": 0})


@pytest.mark.parametrize("key", [key for key, entry in KEYS.items() if not entry.takes and not entry.becomes])
def test_what_cannot_be_honoured_says_why(key: str) -> None:
    assert refusal({key: 1}) == f"backend_config: '{key}' cannot be set here: {KEYS[key].why}"


@pytest.mark.parametrize(("key", "own"), BECOMES.items())
def test_other_names_mean_the_same(key: str, own: str) -> None:
    value = SAMPLE_VALUES.get(own, "v")
    assert value_at(parse_backend_config({key: value}), own) == value


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_old_names_say_what_the_new_ones_say(old: str, new: str) -> None:
    for value in (1, "vllm", {"a": 1}):
        outcomes = []
        for name in (old, new):
            try:
                outcomes.append(parse_backend_config({name: value}))
            except ConfigError as error:
                outcomes.append(str(error).replace(old, new))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("prefix", "why"), FAMILIES.items())
def test_families_are_refused_also_when_they_are_nested(prefix: str, why: str) -> None:
    key = f"{prefix}anything"
    nested: Any = 1
    for name in reversed(key.split(".")):
        nested = {name: nested}
    assert refusal({key: 1}) == refusal(nested) == f"backend_config: '{key}' cannot be set here: {why}"


def test_all_refusals_are_told_at_once_on_one_line() -> None:
    told = refusal({"trainer.logger": "wandb", "trainer": {"epochs": 3}, "data.train_data": []})
    given = ["trainer.logger", "trainer.epochs", "data.train_data"]
    assert re.findall(r"'([\w.]+)' cannot be set here", told) == given
    assert "\n" not in told


def test_sources_merge_whichever_servers_names_they_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "skyrl.toml"
    file.write_text("[backend_config.trainer]\nmicro_batch_tokens = 100\n")
    assert load_config({}, file).backend_config.trainer.micro_batch_tokens == 100
    monkeypatch.setenv("SKYRL_BACKEND_CONFIG", '{"trainer.max_tokens_per_microbatch": 200}')
    assert load_config({}, file).backend_config.trainer.micro_batch_tokens == 200
    monkeypatch.setenv("SKYRL_BACKEND_CONFIG", '{"trainer.logger": "wandb"}')
    with pytest.raises(ConfigError, match="^backend_config: 'trainer.logger' cannot be set here"):
        load_config({}, file)


def test_one_thing_said_twice_is_refused_unless_it_is_the_same() -> None:
    both = {"trainer.micro_batch_tokens": 64, "trainer.max_tokens_per_microbatch": 64}
    assert parse_backend_config(both).trainer.micro_batch_tokens == 64
    told = refusal(both | {"trainer.max_tokens_per_microbatch": 32})
    assert "'trainer.max_tokens_per_microbatch' and another key both set 'trainer.micro_batch_tokens'" in told


def test_options_of_vllm_under_skyrls_names_stand_behind_vllms_own() -> None:
    """As in SkyRL, where engine_init_kwargs is applied last."""
    given = {
        "generator.inference_engine.enforce_eager": True,
        "generator.max_num_batched_tokens": 9,
        f"{ENGINE_OPTIONS}.block_size": 32,
        ENGINE_OPTIONS: {"enforce_eager": False, "seed": 1},
    }
    expected = {"enforce_eager": False, "max_num_batched_tokens": 9, "block_size": 32, "seed": 1}
    assert parse_backend_config(given).inference.engine_init_kwargs == expected
    with pytest.raises(ConfigError, match=r"engine_init_kwargs': Input should be a valid dictionary"):
        parse_backend_config(given | {ENGINE_OPTIONS: 7})


@pytest.mark.parametrize("name", BACKENDS)
def test_backends(name: str) -> None:
    entry = BACKENDS[name]
    if entry.becomes:
        assert load_config({"backend": name}).backend == entry.becomes
    else:
        with pytest.raises(ConfigError) as raised:
            load_config({"backend": name})
        assert str(raised.value) == f"backend: no backend '{name}'; there are: fsdp, none ({entry.why})"


@pytest.mark.parametrize("flag", FLAGS)
def test_flags(flag: str) -> None:
    entry = FLAGS[flag]
    if entry.becomes:
        assert entry.becomes in CliRunner(env={"COLUMNS": "200"}).invoke(app, ["serve", "--help"]).stdout
        assert own_flags([flag, "s3://b/x"]) == [entry.becomes, "s3://b/x"]
        assert own_flags(["--port", "1", f"{flag}=s3://b/x"])[2:] in (
            [entry.becomes, "s3://b/x"],
            [f"{entry.becomes}=s3://b/x"],
        )
    elif entry.takes:
        assert own_flags([flag, "--port", "1"]) == ["--port", "1"]
    else:
        done = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["serve", flag, "1"])
        assert done.exit_code == 2
        assert f"Invalid value for {flag}: {entry.why}" in done.stderr


def test_a_directory_for_checkpoints_becomes_a_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    for base, store in (("/a/b", "file:///a/b"), ("rel", f"file://{tmp_path}/rel"), ("~/c", "file:///home/somebody/c")):
        assert own_flags(["--checkpoints-base", base]) == ["--checkpoint-store", store]
        assert load_config({"checkpoint_store": store}).checkpoint_store == store
    assert skyrl_keys.checkpoint_store("gs://bucket/x") == "gs://bucket/x"
    assert own_flags(["--checkpoints-base"]) == ["--checkpoint-store"], "typer says that a value is missing"


# The page


def cell(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def verdict(entry: Entry) -> str:
    if entry.becomes:
        return f"is `{entry.becomes}`"
    if not entry.takes:
        return f"refused: {entry.why}"
    taken = f"taken: {cell(json.dumps(value) for value in entry.takes)}"
    return f"{taken}; {entry.why}" if entry.why else "taken"


def rows(table: dict[str, Entry]) -> list[str]:
    """Keys with the same verdict share a row."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for key, entry in table.items():
        grouped[verdict(entry)].append(key)
    return [f"| {cell(keys)} | {told} |" for told, keys in grouped.items()]


def families() -> list[str]:
    grouped: dict[str, list[str]] = defaultdict(list)
    for prefix, why in FAMILIES.items():
        grouped[why].append(f"{prefix}*")
    return [f"| {cell(keys)} | refused: {why} |" for why, keys in grouped.items()]


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("Keys", rows(KEYS)),
        ("Groups of keys", families()),
        ("Old names", [f"| `{old}` | `{new}` |" for old, new in OLD_NAMES.items()]),
        ("Values of --backend", rows(BACKENDS)),
        ("Flags", rows(FLAGS)),
    ],
)
def test_the_page_says_what_the_tables_say(heading: str, expected: list[str]) -> None:
    sections = re.split(r"^#+ (.+)$", PAGE.read_text(), flags=re.M)
    section = sections[sections.index(heading) + 1]
    found = [line for line in section.splitlines() if line.startswith("| `")]
    assert found == expected, "the page should have:\n" + "\n".join(expected)


def test_every_name_that_the_page_gives_as_ours_is_there() -> None:
    known = {*known_keys(BackendConfig), ENGINE_OPTIONS}
    for name in BECOMES.values():
        assert name in known or name.startswith(f"{ENGINE_OPTIONS}.")
