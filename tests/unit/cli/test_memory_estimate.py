"""What the launcher and `skyrl doctor` say of the memory of several base models, before a process is started."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from kept_support import release
from safetensors.torch import load_file

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.config.several import base_models_of
from skyrl.base.tiny import model_path
from skyrl.cli.doctor import checks
from skyrl.cli.launcher import memory_estimate
from skyrl.cli.launcher.memory_estimate import (
    LOGITS_COPIES,
    RANK_BYTES,
    RANK_LOADING_BYTES,
    SCORES_BYTES,
    VLLM_BYTES,
    VLLM_LOADING_BYTES,
    Need,
    Size,
    check_memory,
    memory_sentence,
    need_of,
    packed_numbers,
    size_of,
)
from skyrl.inference.model_options import adapter_features, kept_adapters, kv_cache_bytes, slot_features

STUDENT = {"base_model": "tiny", "served_model_names": ["student"]}
TEACHER = {"base_model": "tiny", "served_model_names": ["teacher"], "uses": ["sample"]}
JUDGE = {"base_model": "judge", "uses": ["sample"], "external_inference_url": "http://127.0.0.1:1"}
QWEN = {
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
GIB = 2**30


def parts_of(directory: Path, *entries: dict[str, Any]) -> tuple[ServerConfig, ...]:
    return base_models_of(load_config({"state_dir": directory, "base_models": json.dumps(entries)}))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 8 GiB, of which 6 GiB are free."""
    monkeypatch.setattr(memory_estimate, "host_bytes", lambda: 8.0 * GIB)
    monkeypatch.setattr(memory_estimate, "free_host_bytes", lambda: 6.0 * GIB)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Size]:
    """What `size_of` says of models that are not on this machine."""
    sizes: dict[str, Size] = {}
    monkeypatch.setattr(memory_estimate, "size_of", lambda name: sizes.get(name) or size_of(name))
    return sizes


def test_the_size_of_a_model_is_that_of_its_tensors() -> None:
    file = model_path() / "model.safetensors"
    parameters = sum(tensor.numel() for tensor in load_file(file).values())
    assert size_of(str(model_path())) == Size(parameters, file.stat().st_size)


def test_a_file_that_cannot_be_read_has_bytes_and_no_parameters(tmp_path: Path) -> None:
    assert size_of(str(tmp_path)) is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 100)
    assert size_of(str(tmp_path)) == Size(50, 100)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    assert size_of(str(tmp_path)) == Size(0, 10)


def test_the_estimate_of_a_small_qwen_is_what_its_processes_took(tmp_path: Path) -> None:
    """When it was ready: the shape of Qwen2.5-Coder-0.5B, float32, a context of 4,096, the other keys unset."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"model_type": "qwen2"}))
    need = need_of(load_config({"base_model": str(tmp_path)}), Size(494_000_000, 988_000_000))
    assert need.vllms == pytest.approx(4.49e9, rel=0.05)
    assert need.trainer == pytest.approx(2.47e9, rel=0.05)


def test_a_trainer_and_each_vllm_hold_the_weights_and_a_teacher_has_no_trainer(tmp_path: Path) -> None:
    full = {"trainer.full_finetuning": True}
    two = {"generator.inference_engine.num_engines": 2}
    size = Size(10**9, 2 * 10**9)
    entries = (
        STUDENT,
        TEACHER | {"backend_config": two},
        STUDENT | {"served_model_names": ["full"], "backend_config": full},
    )
    student, teacher, tuned = (need_of(part, size) for part in parts_of(tmp_path, *entries))
    assert student.trainer == RANK_BYTES + RANK_LOADING_BYTES + 4e9
    more = student.vllms - VLLM_BYTES - VLLM_LOADING_BYTES - 4e9
    assert 0 < more < 10e6, "tokenizers, and the embedding and output layer once more"
    assert (teacher.trainer, teacher.vllms) == (0, 2 * student.vllms)
    assert tuned.trainer == RANK_BYTES + RANK_LOADING_BYTES + 16e9
    assert (student.weights, teacher.weights, tuned.weights) == (8e9, 8e9, 20e9)


def test_a_vllm_has_its_embedding_twice_and_room_for_adapters() -> None:
    assert packed_numbers(QWEN) == 151_936 * 896
    assert packed_numbers(QWEN | {"tie_word_embeddings": False}) == 2 * 151_936 * 896
    attention, mlp = 24 * (4 * 896 + 2 * 896 + 2 * 128), 24 * (3 * 896 + 3 * 4864)
    assert adapter_features(QWEN) == attention + mlp + 896 + 151_936
    mixture = QWEN | {"num_experts": 8, "moe_intermediate_size": 64}
    assert adapter_features(mixture) == slot_features(mixture) == slot_features(QWEN) == 896 + 151_936
    assert packed_numbers({}) == adapter_features({}) == slot_features({}) == 0


def test_a_cpu_keeps_adapters_of_a_gigabyte_unless_a_key_says_how_many() -> None:
    def kept(model: dict[str, Any], **keys: int) -> int:
        given = {f"trainer.policy.model.lora.{key}": value for key, value in keys.items()}
        return kept_adapters(model, load_config({"backend_config": given}).backend_config.lora)

    assert kept(QWEN) == 11
    assert kept(QWEN, max_lora_rank=128) == 8, "as many as slots, at least"
    assert kept(QWEN, max_cpu_loras=64) == 64
    assert kept(QWEN | {"vocab_size": 100, "num_hidden_layers": 1}) == 64
    assert kept(QWEN | {"num_experts": 8}) == 64, "of experts nothing is known here"


def test_a_vllm_in_use_has_adapters_a_full_cache_and_what_it_computes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"model_type": "qwen2"}))
    keys = {"generator.inference_engine.max_model_len": 4096, "generator.inference_engine.max_num_seqs": 200}
    use = need_of(load_config({"base_model": str(tmp_path), "backend_config": keys}), Size(10**9, 10**9)).use
    cache = kv_cache_bytes(QWEN, 4096, 200)
    batch, logits = 4 * 8192 * (8 * 896 + 3 * 4864), LOGITS_COPIES * 4 * 200 * 151_936
    assert (use.cache, use.token) == (cache, 2 * 4 * 24 * 128)
    assert use.computing(8192, 1) == batch
    assert use.computing(1, 200) == logits
    assert use.most == 8 * use.slot + 11 * use.adapter + cache + max(batch, logits)
    assert use.reason == "mostly 11 adapters and 8 slots"
    assert use.scoring(1000) == 4 * 1000 * (8 * 896 + 3 * 4864) + SCORES_BYTES
    assert use.scoring(10) == 10 * (4 * (8 * 896 + 3 * 4864) + LOGITS_COPIES * 4 * 151_936)


def test_the_peak_is_what_is_ready_and_what_comes_in_use(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"model_type": "qwen2"}))

    def need(**keys: Any) -> Need:
        given = {"base_model": str(tmp_path), "backend_config": keys}
        return need_of(load_config(given), Size(494_000_000, 988_000_000))

    both = need(**{"generator.inference_engine.num_engines": 2})
    assert both.passing is not None
    more, why = both.passing.worst(10e9)
    size, text = both.peak(10e9)
    assert size == pytest.approx(both.total + 2 * both.use.most + more)
    assert why in text
    full = need(**{"trainer.full_finetuning": True})
    assert full.peak(10e9)[0] == full.total + full.use.most
    assert "without its passes, which are not estimated" in full.peak(10e9)[1]
    assert full.use.slot == full.use.adapter == 0


@pytest.mark.parametrize("case", ["dense-fp8", "latent-mixture-int4", "fused-mixture-mxfp4"])
def test_a_release_with_fewer_bits_has_the_parameters_of_its_model_and_is_kept_only_if_the_key_says_so(
    tmp_path: Path, case: str
) -> None:
    release_path = release(case, tmp_path)
    (full,) = (path for path in tmp_path.iterdir() if str(path) != release_path)
    size, of_model = size_of(release_path), size_of(str(full))
    assert size is not None
    assert of_model is not None
    assert size.parameters == of_model.parameters

    def trainer(**keys: bool) -> float:
        given = {"base_model": release_path, "backend_config": {f"trainer.{key}": keys[key] for key in keys}}
        return need_of(load_config(given), size).trainer - RANK_BYTES

    small = 1.25
    """What is left of loading is a fourth of so few weights."""
    assert trainer() == small * 4 * size.parameters
    assert trainer(keep_quantized=True) == small * size.file_bytes
    assert trainer(full_finetuning=True) == small * 16 * size.parameters


@pytest.mark.usefixtures("memory")
def test_the_sentence_counts_what_this_server_runs(tmp_path: Path) -> None:
    fits, sentence = memory_sentence(parts_of(tmp_path, STUDENT, TEACHER, JUDGE))
    assert fits
    assert re.fullmatch(
        r"memory: about 2\.\d GB when ready, for student 1\.\d GB \(trainer 0\.4 GB, vLLM \S+ GB\), "
        r"teacher \S+ GB \(vLLM \S+ GB\), launcher and API 0\.2 GB; up to \S+ GB in use, for student \S+ GB "
        r"\(trainer \S+ GB in a micro-batch of 4,096 rows; vLLM \S+ GB, mostly .+\), "
        r"teacher \S+ GB \(vLLM \S+ GB, mostly .+\); "
        r"6\.4 GB are available, which fits",
        sentence,
    ), sentence


@pytest.mark.usefixtures("memory")
def test_too_little_free_memory_is_a_warning_and_too_little_memory_is_refused(
    tmp_path: Path, sizes: dict[str, Size], caplog: pytest.LogCaptureFixture
) -> None:
    parts = parts_of(tmp_path, STUDENT, TEACHER)
    path = parts[0].base_model_path
    sizes[path] = Size(500_000_000, 10**9)
    check_memory([(part, ()) for part in parts])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.endswith("6.4 GB are available, which may be too little")
    sizes[path] = Size(800_000_000, 10**9)
    with pytest.raises(ConfigError, match=r"^base_models: the weights alone take 9\.6 GB .* has 8\.6 GB of memory"):
        check_memory([(part, ()) for part in parts])


@pytest.mark.usefixtures("memory")
def test_a_model_that_is_still_to_be_fetched_is_named_and_not_counted(tmp_path: Path) -> None:
    _, sentence = memory_sentence(parts_of(tmp_path, STUDENT, TEACHER | {"base_model": "nobody/has-this"}))
    assert sentence.endswith("; not counted: teacher, whose files are not here yet")


def test_vllms_share_a_gpu_while_it_has_memory_for_both(tmp_path: Path) -> None:
    def check(share: float, *devices: str) -> None:
        large = {"backend_config": {"generator.inference_engine.gpu_memory_utilization": share}}
        first, second = parts_of(tmp_path, STUDENT | large, TEACHER | large)
        check_memory([(first, ("0",)), (second, devices)])

    check(0.5, "0")
    check(0.9, "1")
    with pytest.raises(ConfigError, match=r"vLLMs on GPU 0 take more than its memory \(student 0\.6, teacher 0\.6\)"):
        check(0.6, "0")


def test_doctor_has_a_row_for_each_base_model_and_one_for_their_memory(tmp_path: Path) -> None:
    file = tmp_path / "skyrl.toml"
    lines = (
        line
        for entry in (STUDENT, TEACHER, JUDGE)
        for line in ("[[base_models]]", *(f"{key} = {json.dumps(value)}" for key, value in entry.items()), "")
    )
    entries = "\n".join(lines)
    file.write_text(entries)
    rows = {row.found: row for row in checks(None, tmp_path, file) if row.name == "base model"}
    assert list(rows) == [
        "student: trains and samples, CPU, 0.6483 million parameters",
        "teacher: only samples, CPU, 0.6483 million parameters",
        "judge: sampled at http://127.0.0.1:1",
    ]
    memory = next(row for row in checks(None, tmp_path, file) if row.name == "memory")
    assert memory.found.startswith("about ")
    file.write_text(entries + entries)
    row = checks(None, tmp_path, file)[-1]
    assert row.status == "missing"
    assert "'student' is a name of base_models[0] too" in row.found


def test_doctor_takes_a_base_model_before_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "skyrl.toml"
    file.write_text('base_model = "nobody/has-this"')
    found = [row.found for row in checks(None, tmp_path, file, str(model_path())) if row.name == "base model"]
    assert found == [f"{model_path()}: trains and samples, CPU, 0.6483 million parameters"]
    (memory,) = (row for row in checks(None, tmp_path, file, str(model_path())) if row.name == "memory")
    assert memory.found.startswith("about ")
