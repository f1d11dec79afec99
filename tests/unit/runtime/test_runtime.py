"""What a process of a server is told, how it ends, and what its end says about another start."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError, OperationalError

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.config.several import base_models_of
from skyrl.inference.vllm_command import options_named
from skyrl.runtime.processes.runtime import RUNTIME_ENV, SLOT_ENV, SOCKETS_ENV, Runtime, run_process
from skyrl.runtime.processes.startup import (
    CANNOT_START,
    MARK,
    MAY_START,
    Cause,
    FirstStarts,
    NotLoaded,
    cause_of_own,
    cause_of_vllm,
)
from skyrl.storage.db.faults import outage


def test_a_process_reads_the_servers_settings_and_its_own_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config({"state_dir": tmp_path, "database_url": "postgresql://h/d", "api_processes": 3})
    written = Runtime(
        config, tmp_path, "http://router", "key", "server-1", ("http://one", "http://two"), "ray:1", 9.0, True
    )
    monkeypatch.setenv(RUNTIME_ENV, str(written.write()))
    engine = Runtime.from_environment()
    assert engine == written
    monkeypatch.setenv(SLOT_ENV, "2")
    monkeypatch.setenv(SOCKETS_ENV, "5,7")
    api = Runtime.from_environment()
    assert type(api.config) is ServerConfig
    assert (api.process_id, api.listening) == ("server-1/2", (5, 7))
    assert api.api_doorbell == api.api_doorbells[2]
    assert api.api_doorbells == engine.api_doorbells
    assert len(set(engine.api_doorbells)) == 3


def test_the_rows_of_placed_vllms_have_an_owner_for_each_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [{"base_model": f"acme/{name}"} for name in ("one", "two")]
    configs = load_config({"state_dir": tmp_path, "base_models": entries}), load_config({"state_dir": tmp_path})
    parts = tuple(Runtime(part, tmp_path, None, None, "server-1") for part in base_models_of(configs[0]))
    monkeypatch.setenv(
        RUNTIME_ENV, str(Runtime(configs[0], tmp_path, None, None, "server-1", base_models=parts).write())
    )
    assert [each.placement_owner for each in Runtime.from_environment().each] == ["server-1/one", "server-1/two"]
    assert Runtime(configs[1], tmp_path, None, None, "server-1").placement_owner == "server-1"


def test_a_process_that_loses_its_database_ends_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        raise OperationalError("SELECT 1", {}, Exception("the server\nis gone"))

    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        run_process("the engine", run, outage)
    assert ended.value.code == 1
    (record,) = caplog.records
    assert record.getMessage() == "the engine has ended because the database cannot be used: the server is gone"
    assert record.exc_info is None


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("base_model: x\n holds  no model"), CANNOT_START), (NotLoaded("base_model: x"), MAY_START)],
)
def test_a_process_that_cannot_start_gives_the_reason_in_its_last_line_and_exit_code(
    error: Exception, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_process("the engine", run, outage)
    assert ended.value.code == code
    cause = cause_of_own(code, "\n".join(caplog.messages))
    assert cause is not None
    assert cause.sentence == " ".join(str(error).split())


def test_any_other_error_is_raised() -> None:
    def run() -> None:
        raise IntegrityError("INSERT", {}, Exception("there already"))

    with pytest.raises(IntegrityError):
        run_process("the engine", run, outage)


REFUSED = """usage: api_server.py [-h] [--headless]
                     [model_tag]
api_server.py: error: unrecognized arguments: --bogus-flag
"""
TOO_LONG = """Traceback (most recent call last):
  File "pydantic/_internal/_dataclasses.py", line 121, in __init__
    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (900000) is greater than the derived one [type=value_error, input_value=A]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
NO_MEMORY = """(EngineCore pid=17) ERROR 11-22 04:53:11 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=17) ERROR 11-22 04:53:11 [core.py:1100] ValueError: Free memory on device (3.2/79 GiB) is too small.
Traceback (most recent call last):
  File "vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""
NO_KERNEL = """    raise ValueError(
ValueError: Failed to find a kernel that can implement the WNA16 linear layer. Reasons:
 ZentorchWNA16LinearKernel cannot implement due to: ZentorchWNA16 requires an AMD Zen CPU.
 CPUWNA16LinearKernel cannot implement due to: Quant type (uint8b128) not supported by CPUWNA16
(APIServer pid=32151) INFO 11-28 13:36:27 [utils.py:628] [shutdown] Process manager: send sigterm to process EngineCore
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
OPTIONAL = """WARNING [interface.py:371] Failed to import from vllm._C: ModuleNotFoundError("No module named 'vllm._C'")
"""
"""A warning that vLLM also writes in a good start."""
LACKS_A_MODULE = """(EngineCore pid=17) ERROR [core.py:1100] ModuleNotFoundError: No module named 'numba'
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""
NO_VLLM = "python: Error while finding module specification for 'vllm.x' (ModuleNotFoundError: No module named 'vllm')"


def test_the_cause_of_an_own_process_is_its_marked_line() -> None:
    log = f"loading\nERROR {MARK}base_model: cannot load x: no weights\n"
    sentence = "base_model: cannot load x: no weights"
    assert cause_of_own(CANNOT_START, log) == Cause(sentence, final=True)
    assert cause_of_own(MAY_START, log) == Cause(sentence, final=False)
    assert cause_of_own(1, log) is None, "this exit code belongs to another cause"
    assert cause_of_own(-9, log) is None
    assert cause_of_own(CANNOT_START, "a log without the marked line") is None


@pytest.mark.parametrize(
    ("code", "log", "expected"),
    [
        (2, REFUSED, Cause("unrecognized arguments: --bogus-flag", final=True)),
        (1, TOO_LONG, Cause("User-specified max_model_len (900000) is greater than the derived one", final=True)),
        (1, NO_MEMORY, Cause("ValueError: Free memory on device (3.2/79 GiB) is too small.", final=False)),
        (1, "python: No module named vllm\n", Cause("python: No module named vllm", final=True)),
        (1, f"{NO_VLLM}\n", Cause(NO_VLLM, final=True)),
        (1, OPTIONAL + LACKS_A_MODULE, Cause("ModuleNotFoundError: No module named 'numba'", final=True)),
        (1, NO_KERNEL, Cause("".join(NO_KERNEL.splitlines()[1:4]), final=False)),
        (1, OPTIONAL + NO_MEMORY, Cause("ValueError: Free memory on device (3.2/79 GiB) is too small.", final=False)),
        (1, f"{OPTIONAL}all is well\n", None),
        (1, "all is well\n", None),
        (-9, NO_MEMORY, None),
    ],
    ids=[
        "unknown option",
        "value",
        "memory",
        "not installed",
        "not found",
        "incomplete",
        "no kernel",
        "memory after a warning",
        "a warning alone",
        "nothing said",
        "killed",
    ],
)
def test_the_cause_of_vllms_end_is_read_from_the_end_of_its_log(code: int, log: str, expected: Cause | None) -> None:
    assert cause_of_vllm(code, log) == expected


def test_a_temporary_cause_is_final_when_it_comes_twice_in_a_row() -> None:
    starts = FirstStarts()
    assert starts.hopeless("engine", Cause("no weights", final=True))
    first, second = Cause("Free memory 3.2 GiB", final=False), Cause("Free memory 3.1 GiB", final=False)
    assert not starts.hopeless("vllm", first)
    assert starts.hopeless("vllm", second), "the same cause with other numbers"
    assert not starts.hopeless("vllm", Cause("a socket was taken", final=False))
    assert not starts.hopeless("vllm", None), "a killed process has no cause"
    assert not starts.hopeless("vllm", Cause("a socket was taken", final=False)), (
        "the two starts with this cause were not consecutive"
    )
    assert not starts.hopeless("engine", Cause("a socket was taken", final=False)), "causes are counted per process"


def test_an_option_in_vllms_message_is_named_by_its_configuration_key_and_value() -> None:
    inference = {
        "engine_init_kwargs": {"bogus_flag": 1, "kv-cache-dtype": "banana", "block_size": 16},
        "max_model_len": 900000,
    }
    config = load_config({"backend_config": {"generator.inference_engine": inference}})
    prefix = "generator.inference_engine"
    named = options_named(config, "unrecognized arguments: --bogus-flag")
    assert named == f"{prefix}.engine_init_kwargs.bogus_flag=1"
    named = options_named(config, "argument --kv-cache-dtype: invalid choice: 'banana'")
    assert named == f'{prefix}.engine_init_kwargs.kv-cache-dtype="banana"'
    assert options_named(config, "User-specified max_model_len (900000) is") == f"{prefix}.max_model_len=900000"
    assert options_named(config, "Free memory on device") == ""
