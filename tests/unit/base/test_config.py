"""The configuration: its keys, types, bounds and sources."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from skyrl.base.config.backend import BackendConfig, ConfigError, parse_backend_config
from skyrl.base.config.base_models import Modes
from skyrl.base.config.loading import dump_config, load_config, restore_config
from skyrl.base.config.server import ServerConfig
from tests.postgres_server import ON_SQLITE

# Removing or renaming a key breaks existing configurations, so a change of this list must be deliberate.
SERVER_KEYS = {
    "allow_remote",
    "adapter_dtype",
    "api_keys",
    "api_processes",
    "backend",
    "backend_config",
    "base_model",
    "base_models",
    "devices",
    "checkpoint_store",
    "checkpoint_store_options",
    "database_url",
    "external_inference_api_key",
    "external_inference_priority",
    "external_inference_url",
    "inference_api_key",
    "inference_host",
    "forwarding_deadline_s",
    "forwarding_inference_max_connections",
    "forwarding_zero_fill_logprobs",
    "openai_grammars",
    "host",
    "jwt_auth",
    "access_log",
    "agents",
    "log_file_bytes",
    "log_files_kept",
    "log_format",
    "log_level",
    "otlp_endpoint",
    "trace_ratio",
    "losses",
    "max_body_bytes",
    "missing_seq_id_timeout_s",
    "max_models_per_tenant",
    "max_pending_sample_bytes",
    "max_stored_image_bytes",
    "max_pending_samples",
    "max_sampling_sessions_per_tenant",
    "max_sessions_per_tenant",
    "port",
    "presigned_downloads",
    "public_url",
    "ray_address",
    "quota_models",
    "quota_requests_in_flight",
    "quota_stored_bytes",
    "quota_tokens_per_minute",
    "result_retention_s",
    "sample_use_retrieve_futures",
    "served_model_names",
    "session_timeout_s",
    "min_free_disk_bytes",
    "unnamed_saves_idle_s",
    "snapshot_interval_s",
    "state_dir",
    "stop_grace_s",
    "threads",
    "tokenizer_id",
    "uses",
}
BACKEND_KEYS = {
    "generator.inference_engine.compare_with_trainer",
    "generator.inference_engine.engine_init_kwargs",
    "generator.inference_engine.gpu_memory_utilization",
    "generator.inference_engine.health_timeout_s",
    "generator.inference_engine.max_model_len",
    "generator.inference_engine.max_num_seqs",
    "generator.inference_engine.num_engines",
    "generator.inference_engine.port",
    "generator.inference_engine.probe_interval_s",
    "generator.inference_engine.resources",
    "generator.inference_engine.step_timeout_s",
    "generator.inference_engine.tensor_parallel_size",
    "trainer.attention",
    "trainer.cuda_graphs",
    "trainer.gradient_checkpointing",
    "trainer.full_finetuning",
    "trainer.keep_quantized",
    "trainer.kernels",
    "trainer.merge_passes",
    "trainer.context_parallel_tokens",
    "trainer.micro_batch_tokens",
    "trainer.placement.colocate_all",
    "trainer.placement.expert_parallel",
    "trainer.placement.policy_num_cpu_ranks",
    "trainer.placement.policy_num_gpus_per_node",
    "trainer.placement.policy_num_nodes",
    "trainer.placement.policy_resources",
    "trainer.policy.model.lora.alpha",
    "trainer.policy.model.lora.max_cpu_loras",
    "trainer.policy.model.lora.max_lora_rank",
    "trainer.policy.model.lora.train_mlp_of_mixtures",
    "trainer.policy.model.lora.max_loras",
    "trainer.rank_timeout_s",
}

FULL = {"trainer.full_finetuning": True}


@pytest.fixture(autouse=True)
def no_skyrl_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SKYRL_")]:
        monkeypatch.delenv(name)


def leaves(model: BaseModel, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {f"{prefix}{name}": value}
    return found


def toml(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "skyrl.toml"
    file.write_text(text)
    return file


def test_the_configuration_has_exactly_these_keys() -> None:
    assert set(ServerConfig.model_fields) == SERVER_KEYS
    assert set(leaves(BackendConfig())) == BACKEND_KEYS


@ON_SQLITE
def test_defaults_serve_the_tiny_model_and_forward_samples() -> None:
    config = load_config({})
    assert config.served_names == ("tiny",)
    assert (Path(config.base_model_path) / "config.json").is_file()
    assert config.modes == Modes(trains=True, forwards=True, manages_inference=True)
    assert config.host == "127.0.0.1"
    assert config.state_dir.is_absolute()
    assert config.database == f"sqlite:///{config.state_dir}/skyrl.db"


@pytest.mark.parametrize(
    "given",
    [
        {"trainer.placement.colocate_all": True, "trainer.micro_batch_tokens": 64},
        {"trainer": {"placement": {"colocate_all": True}, "micro_batch_tokens": 64}},
        {"trainer.placement": {"colocate_all": True}, "trainer": {"micro_batch_tokens": 64}},
    ],
    ids=["dotted", "nested", "mixed"],
)
def test_backend_config_takes_dotted_and_nested_keys(given: dict[str, Any]) -> None:
    for config in (
        parse_backend_config(given),
        load_config({"backend_config": given}).backend_config,
        load_config({"backend_config": json.dumps(given)}).backend_config,
    ):
        assert config.trainer.placement.colocate_all is True
        assert config.trainer.micro_batch_tokens == 64
        assert config.lora.max_loras == 8


def test_options_of_vllm_keep_their_names_and_values() -> None:
    options = {"kv_cache_dtype": "fp8", "compilation_config": {"level": 3}, "a.b": [1]}
    for given in (
        {"generator.inference_engine.engine_init_kwargs": options},
        {"generator": {"inference_engine": {"engine_init_kwargs": options}}},
    ):
        assert parse_backend_config(given).inference.engine_init_kwargs == options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"trainer.placement.colocate_al": True},
            "unknown key 'trainer.placement.colocate_al'; the nearest known one is 'trainer.placement.colocate_all'",
        ),
        (
            {"generator": {"inference_engine": {"max_num_seq": 4}}},
            "unknown key 'generator.inference_engine.max_num_seq'; the nearest known one is "
            "'generator.inference_engine.max_num_seqs'",
        ),
        ({"trainer.micro_batch_tokens": "many"}, "'trainer.micro_batch_tokens': Input should be a valid integer"),
        (
            {"trainer.micro_batch_tokens": 1},
            "'trainer.micro_batch_tokens': Input should be greater than or",
        ),
        (
            {"trainer.context_parallel_tokens": 31},
            "'trainer.context_parallel_tokens': Input should be greater than or equal to 32",
        ),
        (
            {"trainer": {"placement": {"policy_num_nodes": 0}}},
            "'trainer.placement.policy_num_nodes': Input should be greater than or equal to 1",
        ),
        (
            {"trainer.placement.policy_num_gpus_per_node": True},
            "'trainer.placement.policy_num_gpus_per_node': Input should be a valid integer",
        ),
        (
            {"generator.inference_engine.resources": {"CPU": -1}},
            "'generator.inference_engine.resources': 'CPU': -1.0 is not an amount of a resource",
        ),
        (
            {"trainer.policy.model.lora.max_lora_rank": 7},
            "'trainer.policy.model.lora.max_lora_rank': Input",
        ),
        ({"trainer.placement": False}, "'trainer.placement' must be an object (got False)"),
        (
            {"trainer.policy.model.lora": {"max_loras": 9, "max_cpu_loras": 4}},
            "'trainer.policy.model.lora': max_cpu_loras must be at least max_loras",
        ),
    ],
)
def test_a_bad_backend_config_is_refused_in_one_line_that_names_the_key(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_backend_config(given)
    assert str(raised.value).startswith(f"backend-config: {message}")
    with pytest.raises(ConfigError) as raised:
        load_config({"backend_config": json.dumps(given)})
    assert str(raised.value).startswith(f"backend_config: {message}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"backend": "megatron"}, "backend: no backend 'megatron'; there are: fsdp, none"),
        ({"port": 0}, "port: Input should be greater than or equal to 1"),
        ({"port": "http"}, "port: Input should be a valid integer"),
        ({"log_level": "loud"}, "log_level: Input should be 'debug', 'info', 'warning' or 'error'"),
        ({"session_timeout_s": -1}, "session_timeout_s: Input should be greater than 0"),
        ({"unnamed_saves_idle_s": 60}, "unnamed_saves_idle_s: Input should be greater than or equal to 300"),
        ({"adapter_dtype": "float16"}, "adapter_dtype: Input should be 'float32' or 'bfloat16'"),
        ({"api_keys": "closed"}, "api_keys: Input should be 'open' or 'managed'"),
        ({"quota_tokens_per_minute": 2**63}, "quota_tokens_per_minute: Input should be less than"),
        ({"api_processes": 2}, "configuration: api_processes=2 needs PostgreSQL, "),
        ({"api_processes": 0, "database_url": "postgresql://h/d"}, "api_processes: Input should be greater than or"),
        ({"host": "0.0.0.0"}, "configuration: host '0.0.0.0' can be reached from elsewhere, and any API key is"),
        ({"backend_config": "{bad"}, "backend_config: not JSON: "),
        ({"backend_config": "[1]"}, "backend_config: Input should be a valid dictionary"),
        (
            {"backend": "none", "base_model": "m"},
            "configuration: backend 'none' is a sampling-only gateway: give",
        ),
        ({"backend": "none", "external_inference_url": "http://x"}, "configuration: backend 'none' needs --base-model"),
        (
            {"backend_config": '{"generator.inference_engine.num_engines": 0}'},
            "backend_config: 'generator.inference_engine.num_engines': Input should be greater than or equal to 1",
        ),
        (
            {
                "backend_config": '{"generator.num_inference_engines": 2, "trainer.placement.colocate_all": true}',
            },
            "configuration: generator.inference_engine.num_engines: 2 vLLMs, but with trainer.placement.colocate_all",
        ),
        (
            {"backend_config": '{"generator.inference_engine": {"num_engines": 2, "port": 65535}}'},
            "configuration: generator.inference_engine.port: the last of 2 vLLMs would listen at 65536",
        ),
        (
            {"backend": "none", "base_model": "m", "external_inference_url": "http://x", "backend_config": FULL},
            "configuration: trainer.full_finetuning: with trainer.full_finetuning no gateway can sample",
        ),
        (
            {"external_inference_url": "http://x", "backend_config": FULL},
            "configuration: trainer.full_finetuning: new weights can be put only into vLLMs that this server runs",
        ),
        (
            {"backend_config": FULL | {"trainer.placement.colocate_all": True}},
            "configuration: trainer.full_finetuning: trainer and vLLM each hold all weights",
        ),
        (
            {"ray_address": "auto", "backend_config": FULL},
            "configuration: checkpoint_store: weights travel by it to the nodes of the Ray cluster (auto)",
        ),
        (
            {"inference_api_key": "k" * 16, "backend_config": FULL},
            "configuration: inference_api_key: with trainer.full_finetuning no gateway can sample, because it would "
            "not know which weights vLLM has; give the server that trains more api_processes: leave it out",
        ),
        (
            {"inference_host": "10.0.0.1", "backend_config": FULL},
            "configuration: inference_host: with trainer.full_finetuning no gateway can sample",
        ),
        (
            {"inference_host": "10.0.0.1", "inference_api_key": "k" * 16, "backend_config": FULL},
            "configuration: inference_host: with trainer.full_finetuning no gateway can sample",
        ),
        (
            {"backend_config": FULL | {"trainer.keep_quantized": True}},
            "configuration: trainer.keep_quantized: with trainer.full_finetuning weights change, and quantized ones",
        ),
        (
            {"backend_config": FULL | {"trainer.cuda_graphs": True}},
            "configuration: trainer.cuda_graphs: with trainer.full_finetuning layers do not run as graphs: ",
        ),
        (
            {"backend_config": FULL | {"trainer.context_parallel_tokens": 65536}},
            "configuration: trainer.context_parallel_tokens: with trainer.full_finetuning no sequence is divided: ",
        ),
        ({"prot": 1}, "configuration: unknown key 'prot'; the nearest known one is 'port'"),
    ],
)
def test_a_bad_option_is_refused_in_one_line_that_names_it(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(flags)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


OPTIONAL = sorted(
    name
    for name, field in ServerConfig.model_fields.items()
    if type(None) in get_args(field.annotation) and name != "base_model"
)


@pytest.mark.parametrize("word", ["None", "none", "null", "NULL"])
@pytest.mark.parametrize("key", OPTIONAL)
def test_a_key_that_may_have_no_value_takes_it_as_a_word_from_every_source(
    key: str, word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert getattr(load_config({key: word}), key) is getattr(load_config({}), key)
    file = tmp_path / "skyrl.toml"
    file.write_text(f'{key} = "{word}"')
    assert getattr(load_config({}, file), key) is getattr(load_config({}), key)
    monkeypatch.setenv(f"SKYRL_{key.upper()}", word)
    assert getattr(load_config({}), key) is getattr(ServerConfig.of({}), key)


def test_no_value_as_a_flag_takes_a_variables_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_FORWARDING_INFERENCE_MAX_CONNECTIONS", "64")
    assert load_config({}).forwarding_inference_max_connections == 64
    assert load_config({"forwarding_inference_max_connections": "None"}).forwarding_inference_max_connections is None
    assert load_config({"backend": "fsdp", "base_model": "none"}).base_model == "none"
    with pytest.raises(ConfigError, match="port: Input should be a valid integer"):
        load_config({"port": "None"})


def test_full_finetuning_may_have_several_ranks() -> None:
    config = load_config({"backend_config": FULL | {"trainer.placement.policy_num_cpu_ranks": 2}})
    assert config.full_finetuning
    assert config.ray == "local"


def test_a_remote_host_needs_managed_keys_or_allow_remote() -> None:
    assert load_config({"host": "0.0.0.0", "api_keys": "managed"}).host == "0.0.0.0"
    assert load_config({"host": "0.0.0.0", "allow_remote": True}).api_keys == "open"


def test_a_gateway_forwards_and_does_not_train() -> None:
    config = load_config({"backend": "none", "base_model": "m", "external_inference_url": "http://x"})
    assert config.modes == Modes(trains=False, forwards=True, manages_inference=False)
    assert config.served_names == ("m",)


@pytest.mark.parametrize(
    ("flags", "modes"),
    [
        ({}, Modes(trains=True, forwards=False, manages_inference=True)),
        ({"external_inference_url": "http://x"}, Modes(trains=True, forwards=True, manages_inference=False)),
        (
            {"external_inference_url": "http://x", "backend": "none", "base_model": "m"},
            Modes(trains=False, forwards=True, manages_inference=False),
        ),
    ],
    ids=["own-vllm", "external", "gateway"],
)
def test_only_a_vllm_that_skyrl_starts_shares_the_trainers_device(flags: dict[str, Any], modes: Modes) -> None:
    assert load_config({"backend_config": '{"trainer.placement.colocate_all": true}', **flags}).modes == modes


SHARED = {"backend": "none", "base_model": "m", "database_url": "postgresql://h/d", "inference_api_key": "k" * 16}


def test_a_gateway_without_an_upstream_shares_the_inference_of_the_server_that_trains() -> None:
    modes = load_config({**SHARED, "backend_config": '{"trainer.placement.colocate_all": true}'}).modes
    assert modes == Modes(trains=False, forwards=True, manages_inference=False, shares_inference=True)
    assert modes.own_inference
    external = load_config({**SHARED, "external_inference_url": "http://x"}).modes
    assert external == Modes(trains=False, forwards=True, manages_inference=False)


@pytest.mark.parametrize("missing", ["database_url", "inference_api_key"])
def test_a_gateway_without_an_upstream_needs_the_database_and_the_key_of_a_server_that_trains(missing: str) -> None:
    given = {name: value for name, value in SHARED.items() if name != missing}
    with pytest.raises(ConfigError, match="give --external-inference-url; or give database_url and inference_api_key"):
        load_config(given)


@ON_SQLITE
def test_an_address_for_gateways_needs_a_key_and_puts_a_router_in_front_of_one_vllm() -> None:
    key = {"inference_api_key": "k" * 16}
    assert not load_config({}).routed
    assert load_config({"inference_host": "10.0.0.1", **key}).routed
    for given, message in (
        ({"inference_host": "10.0.0.1"}, "inference_host: '10.0.0.1' can be reached from elsewhere"),
        ({"inference_host": "0.0.0.0", **key}, "inference_host: '0.0.0.0' is no address that gateways could use"),
        ({"inference_api_key": "short"}, "is shorter than 16 characters"),
        ({"inference_api_key": "k" * 16 + "\n"}, "printable ASCII"),
        (
            {"inference_host": "h", **key, "backend_config": '{"trainer.placement.colocate_all": true}'},
            "leave out one of the two",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(given)


def test_flags_override_the_environment_which_overrides_the_file_which_overrides_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = toml(tmp_path, 'port = 1001\nthreads = 2\nlog_level = "error"\nserved_model_names = ["f"]')
    monkeypatch.setenv("SKYRL_PORT", "1002")
    monkeypatch.setenv("SKYRL_THREADS", "3")
    config = load_config({"port": 1003, "threads": None}, file)
    assert (config.port, config.threads, config.log_level) == (1003, 3, "error")
    assert (config.served_names, config.host) == (("f",), "127.0.0.1")


@pytest.mark.parametrize(
    "in_environment",
    [
        {"trainer.micro_batch_tokens": 200, "trainer.placement.colocate_all": False},
        {"trainer": {"micro_batch_tokens": 200, "placement": {"colocate_all": False}}},
    ],
    ids=["dotted", "nested"],
)
def test_sources_of_backend_config_merge_key_by_key_in_dotted_or_nested_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_environment: dict[str, Any]
) -> None:
    file = toml(
        tmp_path,
        "[backend_config.trainer]\nmicro_batch_tokens = 100\ngradient_checkpointing = true\n"
        "[backend_config.trainer.placement]\ncolocate_all = true\n"
        "[backend_config.generator.inference_engine]\nmax_num_seqs = 1\n",
    )
    monkeypatch.setenv("SKYRL_BACKEND_CONFIG", json.dumps(in_environment))
    flags = {"backend_config": '{"trainer": {"micro_batch_tokens": 300}}'}
    trainer = load_config(flags, file).backend_config.trainer
    assert trainer.micro_batch_tokens == 300, "from the flag"
    assert trainer.placement.colocate_all is False, "from the environment"
    assert trainer.gradient_checkpointing is True, "from the file"
    assert load_config(flags, file).backend_config.inference.max_num_seqs == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SKYRL_BACKEND_CONFIG", "{bad", 'environment: error parsing value for field "backend_config"'),
        ("SKYRL_SERVED_MODEL_NAMES", "plain", 'environment: error parsing value for field "served_model_names"'),
        ("SKYRL_BACKEND_CONFIG", '{"trainer.x": 1}', "backend_config: unknown key 'trainer.x'"),
        ("SKYRL_PORT", "high", "port: Input should be a valid integer"),
    ],
)
def test_a_bad_environment_variable_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as raised:
        load_config({})
    assert str(raised.value).startswith(message)


def test_the_file_and_the_environment_configure_the_checkpoint_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = toml(tmp_path, 'checkpoint_store = "s3://bucket/p"\n[checkpoint_store_options]\nregion = "eu-west-1"\n')
    config = load_config({}, file)
    assert config.checkpoint_store == "s3://bucket/p"
    assert restore_config(dump_config(config)).checkpoint_store_options == {"region": "eu-west-1"}
    monkeypatch.setenv("SKYRL_CHECKPOINT_STORE_OPTIONS", '{"region": "us-east-1"}')
    assert load_config({}, file).checkpoint_store_options == {"region": "us-east-1"}
    with pytest.raises(ConfigError, match="^public_url: 'gpu.example' does not begin with http"):
        load_config({"public_url": "gpu.example"})


@pytest.mark.parametrize("key", ["line\r\nend", "schlüssel", "tab\t"])
def test_an_inference_key_that_fits_no_http_header_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="^external_inference_api_key: must be printable ASCII"):
        load_config({"external_inference_api_key": key})


def test_a_password_in_the_inference_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="^external_inference_url: holds a user or a password"):
        load_config({"external_inference_url": "http://me:secret@gpu.example/v1"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prot = 1", "configuration: unknown key 'prot'; the nearest known one is 'port'"),
        (b"port = ", "config file "),
        (b"\xff\xfe", "config file "),
        (b'backend_config = "{bad"', "backend_config: not JSON"),
    ],
)
def test_a_bad_configuration_file_is_a_config_error(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "skyrl.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_config({}, file)
    assert str(raised.value).startswith(message)


def test_the_message_about_a_missing_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.toml"):
        load_config({}, tmp_path / "nowhere.toml")


def test_a_dumped_configuration_is_restored_independently_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {
        "state_dir": tmp_path,
        "served_model_names": ("a", "b"),
        "max_pending_samples": 7,
        "backend_config": {"generator.inference_engine.engine_init_kwargs": {"none": None, "list": [1]}},
    }
    config = load_config(flags)
    text = dump_config(config)
    monkeypatch.setenv("SKYRL_BASE_MODEL", "from-the-environment")
    monkeypatch.setenv("SKYRL_PORT", "4242")
    added = {"generator": {"inference_engine": {"engine_init_kwargs": {"added": 1}}}}
    monkeypatch.setenv("SKYRL_BACKEND_CONFIG", json.dumps(added))
    restored = restore_config(text)
    assert type(restored) is ServerConfig
    assert restored == config
    assert dump_config(restored) == text


def test_relative_and_home_directories_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load_config({"state_dir": "here"}).state_dir == tmp_path / "here"
    assert load_config({"state_dir": "~/there"}).state_dir == Path("/home/somebody/there")
    (tmp_path / "model").mkdir()
    assert load_config({"base_model": "model"}).base_model_path == str(tmp_path / "model")
    assert load_config({"base_model": "org/model"}).base_model_path == "org/model"


def test_tiny_names_the_built_in_model_in_every_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "skyrl.toml").write_text('base_model = "tiny"')
    built_in = load_config({}).base_model_path
    named = [load_config({"base_model": "tiny"}), load_config({}, tmp_path / "skyrl.toml")]
    monkeypatch.setenv("SKYRL_BASE_MODEL", "tiny")
    for config in (*named, load_config({})):
        assert (config.base_model_path, config.served_names) == (built_in, ("tiny",))
    assert load_config({"base_model": "./tiny"}).base_model_path == str(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("given", "ray", "ranks"),
    [
        ({}, None, 1),
        ({"ray_address": "local"}, "local", 1),
        ({"ray_address": "10.0.0.1:6379"}, "10.0.0.1:6379", 1),
        ({"backend_config": {"trainer.placement.policy_num_gpus_per_node": 8}}, "local", 8),
        ({"backend_config": {"trainer.placement.policy_num_cpu_ranks": 2}}, "local", 2),
        ({"backend_config": {"trainer.placement.policy_num_nodes": 2}}, "auto", 2),
        ({"backend_config": {"trainer.placement.policy_num_nodes": 2}, "ray_address": "local"}, "local", 2),
    ],
)
def test_several_ranks_or_nodes_use_ray(given: dict[str, Any], ray: str | None, ranks: int) -> None:
    config = load_config({"checkpoint_store": "file:///seen/by/every/node", **given})
    assert (config.ray, config.backend_config.trainer.placement.ranks) == (ray, ranks)
    assert config.routed == (ray is not None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ray_address": "ray://10.0.0.1:10001"}, "ray_address: 'ray://10.0.0.1:10001' is the address of a Ray client"),
        ({"ray_address": "somewhere"}, "ray_address: 'somewhere' is not auto, local or HOST:PORT"),
        ({"ray_address": "host:0"}, "ray_address: 'host:0' is not auto, local or HOST:PORT"),
        (
            {"ray_address": "local", "backend_config": {"trainer.placement.colocate_all": True}},
            "configuration: trainer.placement.colocate_all: trainer and vLLM take turns",
        ),
        (
            {
                "ray_address": "local",
                "backend": "none",
                "base_model": "tiny",
                "external_inference_url": "http://127.0.0.1:1",
            },
            "configuration: ray_address: backend 'none' runs neither vLLM nor a trainer",
        ),
    ],
)
def test_a_ray_address_that_cannot_be_used_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(given)
    assert str(raised.value).startswith(message)


def test_adapters_travel_only_to_vllms_of_this_server() -> None:
    two_ranks = {"backend_config": {"trainer.placement.policy_num_cpu_ranks": 2}}
    assert load_config(two_ranks).weights_travel
    external = load_config({**two_ranks, "external_inference_url": "http://127.0.0.1:1"})
    assert (external.ray, external.weights_travel) == ("local", False)
    assert not load_config({}).weights_travel
