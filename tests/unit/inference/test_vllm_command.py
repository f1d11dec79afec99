"""The vLLM command line that a configuration turns into. No process is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.inference import vllm_command
from skyrl.inference.engine_kinds import Vllm
from skyrl.inference.model_options import MIXTURE_LORA_TARGETS, host_memory_warning, memory_hint, room_bytes
from skyrl.inference.placement import ServerSpec, Spot
from skyrl.inference.remote.settings import ADMIN_KEY, NodeSettings, PlacedSidecar
from skyrl.inference.vllm_command import context_length, cuda_devices, inference_devices, render, vllm_spec

TINY = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 128,
    "max_position_embeddings": 1024,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def config_of(model: Path | str, **values: Any) -> ServerConfig:
    return load_config({"base_model": str(model)} | values)


def spec(model: Path | str, *, cuda: bool = False, **backend: Any) -> ServerSpec:
    keys = {name.replace("__", "."): value for name, value in backend.items()}
    return vllm_spec(config_of(model, backend_config=keys), 9123, "secret", cuda=cuda)


def option(server: ServerSpec, name: str) -> list[str]:
    """The arguments of an option; ['absent'] if the command line does not have the option."""
    argv = server.argv
    if f"--{name}" not in argv:
        return ["absent"]
    rest = argv[argv.index(f"--{name}") + 1 :]
    end = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    return list(rest[:end])


def test_a_cpu_server_has_every_setting_that_it_needs(model: Path) -> None:
    server = spec(model)
    assert server.argv[1:4] == ("-m", "skyrl.inference.vllm_plugin.start", "vllm.entrypoints.openai.api_server")
    for flag in ("enforce-eager", "no-enable-chunked-prefill", "enable-lora", "enable-scale-out"):
        assert option(server, flag) == []
    assert option(server, "dtype") == ["float32"]
    assert option(server, "distributed-executor-backend") == ["uni"]
    assert {"lm_head", "experts"} <= set(option(server, "lora-target-modules"))
    assert option(server, "generation-config") == ["vllm"]
    assert option(server, "logprobs-mode") == ["processed_logprobs"]
    assert server.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert server.env["OMP_NUM_THREADS"] == "1"
    assert server.env["OMP_WAIT_POLICY"] == "passive"
    assert server.env["HF_HUB_OFFLINE"] == "1"
    assert option(server, "tensor-parallel-size") == ["absent"]
    assert option(server, "scheduling-policy") == ["priority"]


def test_vllm_listens_on_loopback_and_gets_its_key_by_environment(model: Path) -> None:
    server = spec(model)
    assert option(server, "host") == ["127.0.0.1"]
    assert option(server, "port") == ["9123"]
    assert server.url == "http://127.0.0.1:9123"
    assert server.env["VLLM_API_KEY"] == "secret"
    assert not any("secret" in word for word in server.argv)
    assert server.env["VLLM_HOST_IP"] == "127.0.0.1"
    assert server.env["GLOO_SOCKET_IFNAME"] == server.env["NCCL_SOCKET_IFNAME"] == "lo"


def test_only_with_ray_vllm_fetches_adapters_from_the_checkpoint_store(model: Path) -> None:
    middleware = "skyrl.inference.remote.middleware.StoredAdapterLoads"
    alone = vllm_spec(config_of(model), 9123, "secret", cuda=False)
    assert not any(middleware in word for word in alone.argv)
    assert not any(name.startswith("SKYRL_NODE") for name in alone.env)
    given = {"middleware": "own.module.Own"}
    config = config_of(
        model,
        ray_address="auto",
        checkpoint_store="s3://bucket/prefix",
        checkpoint_store_options={"region": "x"},
        backend_config={"generator.inference_engine.engine_init_kwargs": given},
    )
    server = Vllm(config, "secret").spec("vllm-3", Spot("10.0.0.3", 9123, None, cuda=False, sidecar_port=9124))
    named = [server.argv[at + 1] for at, word in enumerate(server.argv) if word == "--middleware"]
    assert named[1:] == [middleware, "own.module.Own"]
    assert server.env["SKYRL_NODE_STORE"] == "s3://bucket/prefix"
    assert json.loads(server.env["SKYRL_NODE_STORE_OPTIONS"]) == {"region": "x"}
    assert server.sidecar is None


def test_with_ray_and_full_weights_a_sidecar_beside_vllm_fetches_them(model: Path) -> None:
    full = {"trainer.full_finetuning": True}
    config = config_of(model, ray_address="auto", checkpoint_store="s3://bucket/prefix", backend_config=full)
    server = Vllm(config, "secret").spec("vllm-3", Spot("10.0.0.3", 9123, None, cuda=False, sidecar_port=9124))
    assert not any("StoredAdapterLoads" in word for word in server.argv)
    assert not any(name.startswith("SKYRL_NODE") for name in server.env)
    sidecar = server.sidecar
    assert sidecar is not None
    assert sidecar.url == "http://10.0.0.3:9124"
    assert not any("secret" in word for word in sidecar.argv)
    settings = NodeSettings.from_environment(sidecar.env)
    assert (settings.store, settings.api_key) == ("s3://bucket/prefix", "secret")
    placed = PlacedSidecar.from_environment(sidecar.env)
    assert (placed.vllm_url, placed.number, placed.base_model) == ("http://10.0.0.3:9123", 3, str(model))
    assert sidecar.env[ADMIN_KEY] == "secret"


def test_the_command_depends_only_on_its_inputs_and_servers_have_different_seeds(model: Path) -> None:
    config = config_of(model)
    first = vllm_spec(config, 9123, "secret", cuda=False)
    assert first == vllm_spec(config, 9123, "secret", cuda=False)
    other = vllm_spec(config, 9124, "secret", cuda=False)
    assert option(first, "seed") != option(other, "seed")
    seeds = [option(vllm_spec(config, 9123, "k", cuda=False, directory=Path(d)), "seed") for d in ("/tmp/a", "/tmp/b")]
    assert seeds[0] != seeds[1], "each start of a server has other seeds, also with a configured key"


def test_lora_limits_and_names_come_from_the_configuration(model: Path) -> None:
    server = spec(model, trainer__policy__model__lora={"max_loras": 3, "max_cpu_loras": 9, "max_lora_rank": 64})
    assert option(server, "max-loras") == ["3"]
    assert option(server, "max-cpu-loras") == ["9"]
    assert option(server, "max-lora-rank") == ["64"]
    config = config_of(model, served_model_names=("a", "b"))
    assert option(vllm_spec(config, 1, "k", cuda=False), "served-model-name") == ["a", "b"]


@pytest.mark.parametrize(
    ("configured", "expected_length", "expected_batch"),
    [(None, "1024", "8192"), (256, "256", "8192"), (20_000, "20000", "20000")],
)
def test_a_batch_is_as_large_as_the_longest_prompt(
    model: Path, configured: int | None, expected_length: str, expected_batch: str
) -> None:
    server = spec(model, generator__inference_engine__max_model_len=configured)
    assert option(server, "max-model-len") == [expected_length]
    assert option(server, "max-num-batched-tokens") == [expected_batch]


def test_the_kv_cache_of_a_small_model_holds_every_sequence_in_at_most_256_mib(model: Path) -> None:
    # 2 (k, v) * 4 bytes * 32 tokens * 2 layers * 2 heads * 32 = 32,768 bytes per block; 32 blocks per sequence
    assert option(spec(model, generator__inference_engine__max_num_seqs=16), "num-gpu-blocks-override") == ["513"]
    assert option(spec(model), "num-gpu-blocks-override") == ["8193"]


def test_vllm_sizes_the_kv_cache_of_a_large_or_unknown_model(model: Path) -> None:
    big = TINY | {"num_hidden_layers": 28, "num_key_value_heads": 8, "head_dim": 128}
    (model / "config.json").write_text(json.dumps(big))
    server = spec(model)
    assert option(server, "num-gpu-blocks-override") == ["absent"]
    assert server.env["VLLM_CPU_KVCACHE_SPACE"] == "2", "eight sequences of 229 kB a token are 1.9 GB"
    unknown = spec("some/hub-model")
    assert option(unknown, "num-gpu-blocks-override") == ["absent"]
    assert "HF_HUB_OFFLINE" not in unknown.env
    assert option(unknown, "max-model-len") == ["4096"]


def test_a_gpu_server_leaves_these_settings_to_vllm(model: Path) -> None:
    server = spec(model, cuda=True)
    assert option(server, "dtype") == ["bfloat16"]
    assert option(server, "gpu-memory-utilization") == ["0.5"]
    for name in (
        "enforce-eager",
        "no-enable-chunked-prefill",
        "max-model-len",
        "enable-sleep-mode",
        "lora-target-modules",
    ):
        assert option(server, name) == ["absent"]
    assert not any(name.startswith("OMP_") for name in server.env)
    assert "TORCH_COMPILE_DISABLE" not in server.env


def test_sleep_mode_is_enabled_if_the_device_is_shared(model: Path) -> None:
    assert option(spec(model, cuda=True, trainer__placement__colocate_all=True), "enable-sleep-mode") == []


@pytest.mark.parametrize(
    ("devices", "parallel", "colocated", "expected"),
    [
        ((), 1, False, []),
        (("0",), 1, False, ["0"]),
        (("0", "1"), 1, False, ["1"]),
        (("4", "5", "6", "7"), 2, False, ["5", "6"]),
        (("0", "1"), 2, False, ["0", "1"]),
        (("0", "1"), 1, True, ["0"]),
    ],
)
def test_vllm_gets_the_devices_after_the_trainers(
    model: Path, devices: tuple[str, ...], parallel: int, colocated: bool, expected: list[str]
) -> None:
    keys = {
        "generator.inference_engine.tensor_parallel_size": parallel,
        "trainer.placement.colocate_all": colocated,
    }
    assert inference_devices(config_of(model, backend_config=keys), devices) == [expected]


@pytest.mark.parametrize(
    ("devices", "parallel", "expected"),
    [
        ((), 1, [[], []]),
        (("0", "1", "2"), 1, [["1"], ["2"]]),
        (("0", "1"), 1, [["0"], ["1"]]),
        (("0", "1", "2", "3", "4"), 2, [["1", "2"], ["3", "4"]]),
        (("0", "1", "2", "3"), 2, [["0", "1"], ["2", "3"]]),
    ],
)
def test_replicas_share_no_device(
    model: Path, devices: tuple[str, ...], parallel: int, expected: list[list[str]]
) -> None:
    keys = {
        "generator.inference_engine.num_engines": 2,
        "generator.inference_engine.tensor_parallel_size": parallel,
    }
    assert inference_devices(config_of(model, backend_config=keys), devices) == expected


def test_tensor_parallelism_without_gpus_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        spec(model, generator__inference_engine__tensor_parallel_size=2)


def test_engine_init_kwargs_override_the_computed_options(model: Path) -> None:
    overrides = {
        "max-num-batched-tokens": 16384,
        "enforce_eager": False,
        "hf_overrides": {"head_dtype": "float32"},
        "num_gpu_blocks_override": None,
    }
    server = spec(model, generator__inference_engine__engine_init_kwargs=overrides)
    assert server.argv.count("--max-num-batched-tokens") == 1
    assert option(server, "max-num-batched-tokens") == ["16384"]
    assert option(server, "no-enforce-eager") == []
    assert option(server, "enforce-eager") == ["absent"]
    assert json.loads(option(server, "hf-overrides")[0]) == {"head_dtype": "float32"}
    assert option(server, "num-gpu-blocks-override") == ["absent"]


@pytest.mark.parametrize("name", ["port", "host", "api-key", "model", "served_model_name", "lora-target-modules"])
def test_options_that_only_skyrl_sets_are_refused_in_engine_init_kwargs(model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name.replace("-", "_")):
        spec(model, generator__inference_engine__engine_init_kwargs={name: "x"})


def test_grammars_are_xgrammars_unless_the_operator_chooses(model: Path) -> None:
    for given, expected in (
        ({}, {"backend": "xgrammar"}),
        ({"disable_any_whitespace": True}, {"backend": "xgrammar", "disable_any_whitespace": True}),
        ({"backend": "auto"}, {"backend": "auto"}),
    ):
        server = spec(model, generator__inference_engine__engine_init_kwargs={"structured-outputs-config": given})
        assert json.loads(option(server, "structured-outputs-config")[0]) == expected
    assert json.loads(option(spec(model), "structured-outputs-config")[0]) == {"backend": "xgrammar"}


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, []),
        ({"middleware": None}, []),
        ({"middleware": "a.B"}, ["a.B"]),
        ({"middleware": ["a.B", "c"]}, ["a.B", "c"]),
    ],
)
def test_an_operators_middleware_is_added_after_skyrls_own(
    model: Path, given: dict[str, Any], added: list[str]
) -> None:
    argv = spec(model, generator__inference_engine__engine_init_kwargs=given).argv
    middleware = [argv[i + 1] for i, word in enumerate(argv) if word == "--middleware"]
    assert middleware == ["skyrl.inference.vllm_plugin.protocol.IncarnationHeader", *added]


def test_values_are_rendered_as_command_line_options() -> None:
    values = {"a_b": True, "c": False, "d": None, "e": 1.5, "f": ["x", 2], "g": {"k": 1}, "h": "s"}
    values |= {"middleware": ["m.A", "m.B"]}
    expected = ["--a-b", "--no-c", "--e", "1.5", "--f", "x", "2", "--g", '{"k": 1}', "--h", "s"]
    expected += ["--middleware", "m.A", "--middleware", "m.B"]
    assert render(values) == expected


def test_vllm_chooses_the_context_length_on_a_gpu(model: Path) -> None:
    assert context_length(config_of(model), cuda=True) is None


@pytest.mark.parametrize(
    ("visible", "expected"), [("", []), ("-1", []), ("2,3", ["2", "3"]), ("GPU-ab12", ["GPU-ab12"])]
)
def test_cuda_devices_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda_devices() == expected


def test_cuda_devices_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(vllm_command.os, "listdir", lambda _: ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"])
    assert cuda_devices() == ["0", "1"]


def test_temporary_files_go_to_the_given_directory_but_compiled_code_does_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    config, directory = config_of(model), tmp_path / "private"
    assert vllm_spec(config, 1, "k", cuda=False, directory=directory).env["TMPDIR"] == str(directory)
    on_gpu = vllm_spec(config, 1, "k", cuda=True, directory=directory).env
    assert directory not in Path(on_gpu["TORCHINDUCTOR_CACHE_DIR"]).parents
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen")
    assert vllm_spec(config, 1, "k", cuda=True, directory=directory).env["TORCHINDUCTOR_CACHE_DIR"] == "/chosen"


def test_an_untested_vllm_gets_no_development_endpoints(model: Path) -> None:
    config = config_of(model)
    assert vllm_spec(config, 1, "k", cuda=True).env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_SERVER_DEV_MODE" not in vllm_spec(config, 1, "k", cuda=True, tested=False).env


def test_vllm_does_not_ask_the_hub_for_a_cached_model() -> None:
    server = vllm_spec(config_of("some/hub-model"), 1, "k", cuda=False, offline=True)
    assert server.env["HF_HUB_OFFLINE"] == server.env["TRANSFORMERS_OFFLINE"] == "1"


def test_vllm_writes_no_progress_bars_into_the_log(model: Path) -> None:
    server = spec(model)
    assert option(server, "no-use-tqdm-on-load") == []
    assert server.env["TQDM_DISABLE"] == server.env["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"


@pytest.mark.parametrize("cuda", [False, True])
def test_a_server_for_full_fine_tuning_takes_new_weights_and_no_adapters(model: Path, cuda: bool) -> None:
    server = spec(model, cuda=cuda, trainer__full_finetuning=True)
    assert option(server, "worker-extension-cls") == ["skyrl.inference.vllm_plugin.weights.worker.WeightUpdates"]
    for name in ("enable-lora", "max-loras", "max-lora-rank", "lora-target-modules"):
        assert option(server, name) == ["absent"]
    assert server.env["SKYRL_VLLM_TELL_VERSIONS"] == "1"
    adapters = spec(model, cuda=cuda)
    assert option(adapters, "worker-extension-cls") == ["absent"]
    assert "SKYRL_VLLM_TELL_VERSIONS" not in adapters.env


@pytest.mark.parametrize("name", ["enable_lora", "worker_extension_cls"])
def test_options_that_full_fine_tuning_sets_are_not_passed_through(model: Path, name: str) -> None:
    option_of_vllm: dict[str, Any] = {f"generator__inference_engine__engine_init_kwargs__{name}": "x"}
    with pytest.raises(ConfigError, match=f"'{name}' is set by skyrl"):
        spec(model, trainer__full_finetuning=True, **option_of_vllm)
    spec(model, **option_of_vllm)


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A directory with the configuration of a mixture of experts, as transformers writes it."""
    described = {"model_type": "qwen3_moe", "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(described))
    return tmp_path


@pytest.mark.parametrize("cuda", [False, True])
def test_vllm_keeps_room_for_adapters_on_experts_only_where_the_trainer_trains_them(mixture: Path, cuda: bool) -> None:
    others = list(MIXTURE_LORA_TARGETS)
    mlps = ["gate_proj", "up_proj", "down_proj", "w1", "w3", "w2"]
    assert not {"experts", *mlps} & set(others)
    for mode in ("refuse", "leave_out"):
        server = spec(mixture, cuda=cuda, trainer__policy__model__lora__train_mlp_of_mixtures=mode)
        assert option(server, "lora-target-modules") == others
    targets = option(spec(mixture, cuda=cuda), "lora-target-modules")
    assert targets == [*others, "experts", *mlps]


def test_on_a_cpu_vllm_keeps_room_for_experts_also_where_nothing_tells_that_the_hubs_model_has_some() -> None:
    assert "experts" in option(spec("hub/not-on-this-machine"), "lora-target-modules")
    refusing = spec("hub/not-on-this-machine", trainer__policy__model__lora__train_mlp_of_mixtures="refuse")
    assert "experts" not in option(refusing, "lora-target-modules")


def test_a_mixture_with_dense_layers_whose_adapters_vllm_does_not_load_is_refused(mixture: Path) -> None:
    described = json.loads((mixture / "config.json").read_text()) | {"decoder_sparse_step": 2, "num_hidden_layers": 4}
    (mixture / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="base_model: .*decoder_sparse_step 2.*train_mlp_of_mixtures to leave_out"):
        spec(mixture)
    spec(mixture, trainer__policy__model__lora__train_mlp_of_mixtures="leave_out")
    (mixture / "config.json").write_text(json.dumps(described | {"mlp_only_layers": [1]}))
    spec(mixture)
    (mixture / "config.json").write_text(
        json.dumps({**described, "mlp_only_layers": [1], "model_type": "hunyuan_v1_moe"})
    )
    with pytest.raises(ConfigError, match="by transformers' class in vLLM, which loads no adapters on its experts"):
        spec(mixture)


QWEN3_30B: dict[str, Any] = {
    "num_hidden_layers": 48,
    "num_local_experts": 128,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "mlp_only_layers": [],
}


def test_the_room_for_adapters_on_experts_is_named_where_vllm_has_too_little_memory() -> None:
    lora = "trainer.policy.model.lora"
    config = load_config({})
    assert room_bytes(config, QWEN3_30B) == 2 * 8 * 48 * 128 * 32 * 3 * (2048 + 768)
    hint = memory_hint(config, QWEN3_30B, "RuntimeError: CUDA out of memory")
    assert "26.6 GB for adapters on the experts" in hint
    assert f"{lora}.max_loras (8) or max_lora_rank (32), or set train_mlp_of_mixtures to leave_out or refuse" in hint
    assert memory_hint(config, QWEN3_30B, "ValueError: no such option") == ""
    assert memory_hint(config, {"num_hidden_layers": 2, "hidden_size": 8}, "out of memory") == ""
    refusing = load_config({"backend_config": {f"{lora}.train_mlp_of_mixtures": "refuse"}})
    assert memory_hint(refusing, QWEN3_30B, "out of memory") == ""
    every_second = room_bytes(config, {**QWEN3_30B, "decoder_sparse_step": 2, "mlp_only_layers": [0, 1]})
    assert every_second == room_bytes(config, {**QWEN3_30B, "num_hidden_layers": 23})
    parallel = load_config({"backend_config": {"generator.inference_engine.tensor_parallel_size": 4}})
    assert room_bytes(parallel, QWEN3_30B) == 2 * 8 * 48 * 128 * 32 * 3 * (2048 + 192)


def test_a_warning_names_the_hosts_memory_for_adapters_on_experts() -> None:
    lora = "trainer.policy.model.lora"
    warning = host_memory_warning(load_config({}), QWEN3_30B)
    assert warning is not None
    assert f"{lora}.max_cpu_loras: 64 adapters on the experts of the base model take up to 213 GB" in warning
    fewer = {f"{lora}.max_cpu_loras": 4, f"{lora}.max_loras": 4}
    assert host_memory_warning(load_config({"backend_config": fewer}), QWEN3_30B) is None
    leaving = {f"{lora}.train_mlp_of_mixtures": "leave_out"}
    assert host_memory_warning(load_config({"backend_config": leaving}), QWEN3_30B) is None


@pytest.mark.parametrize("cuda", [False, True])
def test_experts_of_full_fine_tuning_have_a_kernel_that_takes_new_weights(mixture: Path, cuda: bool) -> None:
    """A GPU of another kind than Hopper may have kernels that keep them in a form of their own."""
    server = spec(mixture, cuda=cuda, trainer__full_finetuning=True)
    assert option(server, "moe-backend") == ["triton" if cuda else "absent"]
    assert option(spec(mixture, cuda=cuda), "moe-backend") == ["absent"]
