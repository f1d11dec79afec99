"""Configuration keys and flags of SkyRL: each is accepted, renamed, or refused with the reason.

The page "Coming from SkyRL" names the command that prints all of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from skyrl.base.config import skyrl_keys
from skyrl.base.config.backend import BackendConfig, ConfigError, known_keys, parse_backend_config
from skyrl.base.config.loading import load_config
from skyrl.base.config.skyrl_keys import BACKENDS, ENGINE_OPTIONS, FAMILIES, FLAGS, KEYS, OLD_NAMES, Entry
from skyrl.cli.main import app, own_flags

PAGE = Path(__file__).parents[3] / "docs/operating/coming-from-skyrl.md"
COMMAND = "python -m skyrl.base.config.skyrl_keys"
OPERATORS = {
    "trainer.placement.colocate_all": False,
    "trainer.policy.megatron_config.lora_config.merge_lora": False,
    "trainer.policy.model.lora.max_loras": 4,
    "trainer.policy.model.lora.max_cpu_loras": 8,
}
"""The configuration that SkyRL's page on many tenants recommends."""
BECOMES = {key: entry.becomes for key, entry in KEYS.items() if entry.becomes}
SAMPLE_VALUES: dict[str, Any] = {
    "trainer.micro_batch_tokens": 64,
    "trainer.gradient_checkpointing": True,
    "trainer.policy.model.lora.max_lora_rank": 8,
    "generator.inference_engine.max_num_seqs": 3,
}


@pytest.fixture(autouse=True)
def no_skyrl_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SKYRL_")]:
        monkeypatch.delenv(name)


def value_at(config: BackendConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config({"backend_config": given})
    return str(raised.value)


def test_the_recommended_skyrl_configuration_is_accepted_unchanged() -> None:
    for given in (OPERATORS, json.dumps(OPERATORS)):
        config = load_config({"backend_config": given}).backend_config
        assert (config.lora.max_loras, config.lora.max_cpu_loras) == (4, 8)
        assert config.trainer.placement.colocate_all is False


def test_serve_accepts_skyrl_flags(tmp_path: Path) -> None:
    """Only the port is refused, so the flags before it were accepted."""
    flags = ["--backend", "fsdp2", "--checkpoints-base", str(tmp_path), "--no-use-ray", "--port", "0"]
    done = CliRunner().invoke(app, ["serve", "--backend-config", json.dumps(OPERATORS), *flags])
    assert done.exit_code == 2
    assert done.stderr.startswith("skyrl serve: port: Input should be greater than or equal to 1")
    other = json.dumps(OPERATORS | {"trainer.policy.megatron_config.lora_config.merge_lora": True})
    done = CliRunner().invoke(app, ["serve", "--backend-config", other, *flags])
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert "lora_config.merge_lora' cannot be True: adapters are never merged" in done.stderr


@pytest.mark.parametrize("key", [key for key, entry in KEYS.items() if entry.takes])
def test_only_values_that_this_server_implements_are_accepted(key: str) -> None:
    for value in KEYS[key].takes:
        assert parse_backend_config({key: value}) == BackendConfig()
    assert refusal({key: "other"}) == f"backend_config: '{key}' cannot be 'other': {KEYS[key].why}"


def test_true_is_not_1_and_0_is_not_false() -> None:
    assert "num_prefill' cannot be False" in refusal({"generator.inference_engine.num_prefill": False})
    key = "trainer.policy.sequence_parallel_size"
    assert f"{key}' cannot be True" in refusal({key: True})
    assert "merge_lora' cannot be 0" in refusal({"trainer.policy.megatron_config.lora_config.merge_lora": 0})


@pytest.mark.parametrize("key", [key for key, entry in KEYS.items() if not entry.takes and not entry.becomes])
def test_an_unsupported_key_is_refused_with_the_reason(key: str) -> None:
    assert refusal({key: 1}) == f"backend_config: '{key}' cannot be set here: {KEYS[key].why}"


def test_rank_0_starts_a_server_for_full_fine_tuning() -> None:
    assert load_config({"backend_config": {"trainer.policy.model.lora.rank": 0}}).full_finetuning
    nested = {"trainer": {"policy": {"model": {"lora": {"rank": 8}}}}}
    assert "rank' cannot be set here: clients choose the rank" in refusal(nested)
    assert not load_config({}).full_finetuning


@pytest.mark.parametrize(("key", "own"), BECOMES.items())
def test_a_skyrl_key_sets_the_key_that_it_becomes(key: str, own: str) -> None:
    value = SAMPLE_VALUES.get(own, "v")
    assert value_at(parse_backend_config({key: value}), own) == value


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_an_old_name_behaves_like_the_new_one(old: str, new: str) -> None:
    for value in (1, "vllm", {"a": 1}):
        outcomes = []
        for name in (old, new):
            try:
                outcomes.append(parse_backend_config({name: value}))
            except ConfigError as error:
                outcomes.append(str(error).replace(old, new))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("prefix", "why"), FAMILIES.items())
def test_keys_of_an_unsupported_group_are_refused_dotted_or_nested(prefix: str, why: str) -> None:
    key = f"{prefix}anything"
    nested: Any = 1
    for name in reversed(key.split(".")):
        nested = {name: nested}
    assert refusal({key: 1}) == refusal(nested) == f"backend_config: '{key}' cannot be set here: {why}"


def test_one_line_names_all_refused_keys() -> None:
    message = refusal({"trainer.logger": "wandb", "trainer": {"epochs": 3}, "data.train_data": []})
    given = ["trainer.logger", "trainer.epochs", "data.train_data"]
    assert re.findall(r"'([\w.]+)' cannot be set here", message) == given
    assert "\n" not in message


def test_sources_merge_although_one_uses_skyrls_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "skyrl.toml"
    file.write_text("[backend_config.trainer]\nmicro_batch_tokens = 100\n")
    assert load_config({}, file).backend_config.trainer.micro_batch_tokens == 100
    monkeypatch.setenv("SKYRL_BACKEND_CONFIG", '{"trainer.max_tokens_per_microbatch": 200}')
    assert load_config({}, file).backend_config.trainer.micro_batch_tokens == 200
    monkeypatch.setenv("SKYRL_BACKEND_CONFIG", '{"trainer.logger": "wandb"}')
    with pytest.raises(ConfigError, match="^backend_config: 'trainer.logger' cannot be set here"):
        load_config({}, file)


def test_two_keys_for_one_setting_are_refused_unless_their_values_agree() -> None:
    both = {"trainer.micro_batch_tokens": 64, "trainer.max_tokens_per_microbatch": 64}
    assert parse_backend_config(both).trainer.micro_batch_tokens == 64
    message = refusal(both | {"trainer.max_tokens_per_microbatch": 32})
    assert "'trainer.max_tokens_per_microbatch' and another key both set 'trainer.micro_batch_tokens'" in message


def test_engine_init_kwargs_override_vllm_options_under_skyrls_names() -> None:
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
def test_a_skyrl_backend_is_renamed_or_refused_with_the_reason(name: str) -> None:
    entry = BACKENDS[name]
    if entry.becomes:
        assert load_config({"backend": name}).backend == entry.becomes
    else:
        with pytest.raises(ConfigError) as raised:
            load_config({"backend": name})
        assert str(raised.value) == f"backend: no backend '{name}'; there are: fsdp, none ({entry.why})"


@pytest.mark.parametrize("flag", FLAGS)
def test_a_skyrl_flag_is_renamed_ignored_or_refused_with_the_reason(flag: str) -> None:
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


def test_a_checkpoints_directory_becomes_a_checkpoint_store_url(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    for base, store in (("/a/b", "file:///a/b"), ("rel", f"file://{tmp_path}/rel"), ("~/c", "file:///home/somebody/c")):
        assert own_flags(["--checkpoints-base", base]) == ["--checkpoint-store", store]
        assert load_config({"checkpoint_store": store}).checkpoint_store == store
    assert skyrl_keys.checkpoint_store("gs://bucket/x") == "gs://bucket/x"
    assert own_flags(["--checkpoints-base"]) == ["--checkpoint-store"], (
        "without a value the flag is renamed, and typer reports the missing value"
    )


def test_one_command_prints_a_line_for_every_entry() -> None:
    assert COMMAND in PAGE.read_text()
    done = subprocess.run([sys.executable, *COMMAND.split()[1:]], capture_output=True, text=True, check=True)
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    tables: list[dict[str, Entry]] = [BACKENDS, FLAGS, KEYS]
    entries = [(name, entry) for table in tables for name, entry in table.items()]
    assert len(lines) == len(entries) + len(FAMILIES) + len(OLD_NAMES)
    for name, entry in entries:
        if entry.takes:
            assert lines[name].startswith("taken")
            assert lines[name].endswith(entry.why)
        else:
            assert lines[name] == (f"is {entry.becomes}" if entry.becomes else f"refused: {entry.why}")
    assert lines["strategy"] == f'taken: "fsdp", "fsdp2"; {KEYS["strategy"].why}'
    assert lines["--no-use-ray"] == "taken"
    assert lines["data.*"] == f"refused: {FAMILIES['data.']}"
    assert lines["generator.max_num_seqs"] == "is generator.inference_engine.max_num_seqs"


def test_every_key_that_skyrl_keys_become_exists() -> None:
    known = {*known_keys(BackendConfig), ENGINE_OPTIONS}
    for name in BECOMES.values():
        assert name in known or name.startswith(f"{ENGINE_OPTIONS}.")
