"""The configuration of a rollout client, the engines' own arguments, and what importing the client loads."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import warnings

import pytest

from skyrl.rollout.config import RolloutConfig
from skyrl.rollout.engines import engine_hooks

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"vllm", "sglang", "torch", "transformers"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
try:
    import torch
except ImportError:
    pass
else:
    raise SystemExit("nothing is blocked")
import skyrl.rollout
from skyrl.rollout import client, config, engines, messages, strategies
print("skyrl.cli.launcher.rollout_plane" in sys.modules)
"""


def test_generic_names_are_read_from_a_namespace_and_others_are_not_looked_at() -> None:
    args = argparse.Namespace(rollout_router_ip="10.0.0.1", rollout_num_engines=2, rollout_concurrency=3, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = RolloutConfig.from_args(args)
    assert config.router_url == "http://10.0.0.1:30000"
    assert config.max_requests == 6
    assert RolloutConfig(rollout_router_ip="::1").router_url == "http://[::1]:30000"


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("sglang_router_ip", "rollout_router_ip", "10.0.0.1"),
        ("sglang_router_port", "rollout_router_port", 3000),
        ("sglang_server_concurrency", "rollout_concurrency", 7),
        ("sglang_dp_size", "rollout_dp_size", 2),
        ("sglang_router_policy", "rollout_router_policy", "round_robin"),
        ("sglang_enable_deterministic_inference", "rollout_deterministic_inference", True),
    ],
)
def test_an_alias_warns_with_the_new_name(alias: str, name: str, value: object) -> None:
    with pytest.warns(DeprecationWarning, match=f"{alias} is deprecated; use {name}"):
        config = RolloutConfig.from_args({alias: value})
    assert getattr(config, name) == value


def test_a_value_and_its_alias_must_agree() -> None:
    given = {"rollout_concurrency": 8, "sglang_server_concurrency": 9}
    with pytest.raises(ValueError, match=r"rollout_concurrency is 8 .* sglang_server_concurrency is 9"):
        RolloutConfig.from_args(given)
    with pytest.warns(DeprecationWarning, match="sglang_server_concurrency"):
        assert RolloutConfig.from_args(given | {"sglang_server_concurrency": 8}).rollout_concurrency == 8
    assert RolloutConfig.from_args(given | {"sglang_server_concurrency": None}).rollout_concurrency == 8


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="rollout_concurency: unknown; the nearest known name is rollout_concurrency"):
        RolloutConfig.from_args({"rollout_concurency": 8})
    with pytest.raises(ValueError, match="rollout_batch_size: .* the framework's own go into `others`"):
        RolloutConfig.from_args({"rollout_batch_size": 8})
    RolloutConfig.from_args({"rollout_batch_size": 8}, others={"rollout_batch_size"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout_concurrency", 0),
        ("rollout_num_engines", True),
        ("rollout_router_port", "30000"),
        ("rollout_seed", -1),
        ("rollout_deadline_s", 0),
        ("rollout_router_ip", ""),
        ("rollout_deterministic_inference", "yes"),
        ("rollout_engine_urls", "http://127.0.0.1:1"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        RolloutConfig.from_args({name: value})


def test_vllm_arguments_become_flags_of_skyrl_rollout() -> None:
    config = RolloutConfig(rollout_num_engines=2, rollout_dp_size=2, rollout_strategy="radix", rollout_state_dir="/s")
    args = {"vllm_max_model_len": 2048, "vllm_enforce_eager": True, "vllm_seed": None, "sglang_dp_size": 2}
    flags = engine_hooks(config).finalize_args(args)
    assert flags[:6] == ("--host", "127.0.0.1", "--port", "30000", "--num-engines", "4")
    assert flags[6:10] == ("--state-dir", "/s", "--middleware", "radix")
    assert json.loads(flags[flags.index("--backend-config") + 1]) == {
        "generator.inference_engine.max_model_len": 2048,
        "generator.inference_engine.engine_init_kwargs.enforce_eager": True,
    }


def test_sglang_arguments_become_flags_of_its_server() -> None:
    config = RolloutConfig(rollout_backend="sglang", rollout_dp_size=2, rollout_deterministic_inference=True)
    args = {
        "sglang_mem_fraction_static": 0.7,
        "sglang_enable_metrics": True,
        "sglang_disable_radix_cache": False,
        "sglang_cuda_graph_bs": [1, 2],
        "sglang_router_request_timeout_secs": 5,
    }
    assert " ".join(engine_hooks(config).finalize_args(args)) == (
        "--mem-fraction-static 0.7 --enable-metrics --cuda-graph-bs 1 2 --dp-size 2 --enable-deterministic-inference"
    )


@pytest.mark.parametrize(
    ("backend", "other", "hint"),
    [
        ("vllm", "sglang_mem_fraction_static", " (give vllm_gpu_memory_utilization)"),
        ("vllm", "sglang_schedule_policy", ""),
        ("sglang", "vllm_seed", ""),
    ],
)
def test_arguments_of_the_other_backend_are_refused_by_name(backend: str, other: str, hint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{other}{hint}: not for the backend {backend}")):
        engine_hooks(RolloutConfig(rollout_backend=backend)).finalize_args({other: 1})


def of_slime(**given: object) -> argparse.Namespace:
    """As slime's command line makes it: every argument of SGLang with its default, and what the user gives."""
    defaults: dict[str, object] = {
        "sglang_router_ip": None,
        "sglang_router_port": None,
        "sglang_router_request_timeout_secs": 14400,
        "sglang_server_concurrency": 512,
        "sglang_dp_size": 1,
        "sglang_tp_size": 1,
        "sglang_dtype": "auto",
        "sglang_kv_cache_dtype": "auto",
        "sglang_mem_fraction_static": None,
        "sglang_context_length": None,
        "sglang_enable_deterministic_inference": False,
        "sglang_enable_metrics": False,
        "sglang_schedule_policy": "fcfs",
        "sglang_max_prefill_tokens": 16384,
    }
    return argparse.Namespace(**defaults | given)


def test_sglangs_defaults_in_a_namespace_of_slimes_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RolloutConfig.from_args(of_slime()) == RolloutConfig()
        own = RolloutConfig.from_args(
            of_slime(rollout_concurrency=8, rollout_dp_size=2, rollout_deterministic_inference=True)
        )
    assert (own.rollout_concurrency, own.rollout_dp_size, own.rollout_deterministic_inference) == (8, 2, True)
    with pytest.warns(UserWarning, match="3 arguments are not for the backend vllm, such as sglang_max_prefill_tokens"):
        flags = engine_hooks(own).finalize_args(of_slime(vllm_max_model_len=2048))
    assert json.loads(flags[flags.index("--backend-config") + 1]) == {"generator.inference_engine.max_model_len": 2048}
    with pytest.warns(DeprecationWarning, match="sglang_router_ip"):
        assert RolloutConfig.from_args(of_slime(sglang_router_ip="10.0.0.1")).rollout_router_ip == "10.0.0.1"


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("sglang_context_length", 8192, "vllm_max_model_len"),
        ("sglang_tp_size", 2, "vllm_tensor_parallel_size"),
        ("sglang_mem_fraction_static", 0.6, "vllm_gpu_memory_utilization"),
    ],
)
def test_what_a_namespace_asks_of_sglang_and_vllm_has_is_refused_with_vllms_key(
    name: str, value: object, key: str
) -> None:
    hooks = engine_hooks(RolloutConfig())
    with pytest.raises(ValueError, match=re.escape(f"{name} (give {key}): not for the backend vllm")):
        hooks.finalize_args(of_slime(**{name: value}))
    with pytest.warns(UserWarning, match="such as sglang"):
        flags = hooks.finalize_args(of_slime(**{name: value, key: value}))
    (option,) = json.loads(flags[flags.index("--backend-config") + 1]).items()
    assert option == (f"generator.inference_engine.{key.removeprefix('vllm_')}", value)


@pytest.mark.parametrize("args", [{"vllm_base_url": "http://a:8000"}, of_slime(vllm_base_url="http://a:8000")])
def test_the_address_of_a_vllm_is_refused_with_the_keys_to_use(args: object) -> None:
    """It would be ignored, and samples come from whatever listens at the default address."""
    words = "vllm_base_url: .*`skyrl sidecar --vllm-url URL`.* as rollout_router_ip and rollout_router_port"
    with pytest.raises(ValueError, match=words):
        RolloutConfig.from_args(args)
    with pytest.raises(ValueError, match=words):
        engine_hooks(RolloutConfig()).finalize_args(args)


def test_engines_that_run_already_are_not_ignored_by_the_backend_that_starts_its_own() -> None:
    hooks = engine_hooks(RolloutConfig(rollout_engine_urls=("http://a:1",)))
    with pytest.raises(ValueError, match="rollout_engine_urls: .* rollout_router_ip and rollout_router_port"):
        hooks.finalize_args({})


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="rollout_backend: must be one of vllm, sglang"):
        engine_hooks(RolloutConfig(rollout_backend="tensorrt"))


def test_the_client_is_imported_without_engines_and_without_torch() -> None:
    ran = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "False", "the plane is loaded with the client"
