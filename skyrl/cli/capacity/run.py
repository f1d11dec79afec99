"""One run of `skyrl capacity`: a server of its own with the configuration that is asked about, in a temporary directory
and on free ports, measured and ended. A real server, its state and its database are not touched.

Knows which keys decide. What is measured is `skyrl.cli.capacity.measure`'s.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skyrl.base.config.backend import parse_backend_config
from skyrl.base.config.loading import PREFIX
from skyrl.base.config.pass_memory import ON_CPU
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.model_files import model_config
from skyrl.cli.capacity.answer import Answer, Found, Load, Setting, answer_of
from skyrl.cli.capacity.client import Clock, Failed
from skyrl.cli.capacity.measure import Course
from skyrl.cli.capacity.memory import DeviceMemory, HostMemory
from skyrl.cli.demo.server import DemoServer
from skyrl.cli.launcher.auto_slots import most_slots, with_slots
from skyrl.cli.launcher.kept_capacity import Kept, of_backend, of_server, write
from skyrl.cli.launcher.main import with_threads
from skyrl.cli.launcher.memory_estimate import Need, need_of, size_of
from skyrl.cli.launcher.preflight import check
from skyrl.inference.model_options import kept_adapters

SESSION_S = 86_400
"""Sessions send no heartbeats here."""
STOP_S = 10.0
"""The last part of the time. A server that has not ended then is killed."""
GRACE_S = 5.0
"""For a pass that runs when the server is to end."""
Say = Callable[[str], None]


def measured(config: ServerConfig, load: Load, minutes: float, say: Say) -> Answer:
    """Measure, and keep the number for `max_loras`. Raises ConfigError, ServerFailed and Failed."""
    check_measurable(config)
    clock = Clock(60 * minutes - STOP_S)
    given = config.backend_config.lora.max_loras
    config = config.model_copy(update={"backend_config": parse_backend_config(of_backend(config))})
    config, sentence = with_slots(with_threads(config))
    if sentence:
        say(sentence)
    devices = check(config).devices
    size = size_of(config.base_model_path)
    need = need_of(config, size) if size is not None and not devices else None
    lora = config.backend_config.lora
    setting = Setting(
        base_model=config.served_names[0],
        rank=lora.max_lora_rank,
        slots=None if given == "auto" else given,
        kept=lora.max_cpu_loras if devices else kept_adapters(model_config(config.base_model_path), lora),
        most_slots=most_slots(config),
        engines=config.backend_config.inference.num_engines,
        cores=len(os.sched_getaffinity(0)),
        threads=config.threads,
        gpus=tuple(devices),
        more_apis=config.api_processes - 1,
    )
    found = _found(config, load, clock, devices, need, say)
    answer = answer_of(setting, load, found, need)
    if answer.auto is None or found.passed is None:
        return answer
    try:
        write(config, Kept(answer.auto, found.available, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")))
    except OSError as error:
        found.notes.append(f'the answer could not be kept for max_loras = "auto": {error}')
    return answer


def check_measurable(config: ServerConfig) -> None:
    """Raises ConfigError, which names the key, unless the server has one base model and adapters, and all of it runs on
    this machine."""
    why = ""
    if not Path("/proc/meminfo").exists():
        why = "this system has no /proc, by which memory is measured"
    elif config.base_models:
        why = "base_models: one base model is measured at a time: give --base-model, and a file without the others"
    elif not config.modes.trains:
        why = "backend: none trains nothing, so there is no capacity to measure"
    elif not config.modes.manages_inference:
        why = "external_inference_url: a vLLM that somebody else runs is not measured: leave it out"
    elif config.ray is not None:
        why = "ray_address: only this machine is measured, without Ray: leave it out, and give the trainer one rank"
    elif config.full_finetuning:
        why = "trainer.full_finetuning: the server then trains one model and no adapters: leave it out"
    if why:
        raise ConfigError(why)


def environment_of(config: ServerConfig, outer: Mapping[str, str]) -> dict[str, str]:
    """What the measured server finds: the variables `outer` of this process, and of the configuration the keys that its
    capacity depends on, but for `backend_config`. Keys of a real server's state and clients are left out."""
    own = {f"{PREFIX}{name.upper()}" for name in ServerConfig.model_fields}
    kept = {name: value for name, value in outer.items() if name.upper() not in own}
    own_values = {"session_timeout_s": SESSION_S, "stop_grace_s": GRACE_S, "threads": config.threads}
    values: dict[str, Any] = of_server(config) | own_values
    return kept | {f"{PREFIX}{name.upper()}": _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _found(
    config: ServerConfig, load: Load, clock: Clock, devices: Sequence[str], need: Need | None, say: Say
) -> Found:
    vocabulary = model_config(config.base_model_path).get("vocab_size")
    if not isinstance(vocabulary, int):
        raise Failed(f"base_model: config.json of {config.base_model_path} has no vocab_size")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-capacity-")))
        memory = HostMemory() if not devices else DeviceMemory(_of_trainer(config, devices))
        environment = environment_of(config, os.environ)
        server = DemoServer(directory / "state", backend_config=of_backend(config), environment=environment)
        stack.callback(lambda: server.stop(max(1.0, clock.left_s + STOP_S)))
        say("a server starts")
        server.start()
        memory.launcher = server.pid
        server.wait_ready(clock.left_s)
        passing = None if need is None else need.passing
        course = Course(
            server,
            memory,
            clock,
            load,
            base_model=config.served_names[0],
            rank=config.backend_config.lora.max_lora_rank,
            vocabulary=vocabulary,
            rows=passing.rows if passing is not None else _micro_batch(config),
            adapter=0.0 if passing is None else passing.in_training,
            slots=config.backend_config.lora.slots,
            say=say,
        )
        return course.run(stack)


def _of_trainer(config: ServerConfig, devices: Sequence[str]) -> list[str]:
    """As the engine takes them (`skyrl.inference.vllm_command.inference_devices` takes the next ones)."""
    return list(devices[: config.backend_config.trainer.placement.policy_num_gpus_per_node])


def _micro_batch(config: ServerConfig) -> int:
    return config.backend_config.trainer.micro_batch_tokens or ON_CPU.most
