"""`skyrl model from-gguf`: a model written as GGUF comes back with the same logits, the same tokens and the same
template; what the conversion does not know of a file, it refuses by name."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl.base.config.server import ConfigError
from skyrl.base.tiny import model_path
from skyrl.trainer.model.loading import load_model
from skyrl.trainer.tools.from_gguf import convert, main
from tests.gguf_files import BYTE, CONTROL, NORMAL, OWN, UNKNOWN, UNUSED, Words, filler, write_gguf

ROWS = 96
SHAPE: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 8,
    "num_hidden_layers": 7,
    "final_logit_softcapping": 20.0,
}
GEMMA_KEYS = {"attention.sliding_window": 8, "final_logit_softcapping": 20.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "Llama", {"head_dim": 32, "tie_word_embeddings": False}, {}),
    "llama-tied-biased": ("llama", "Llama", {"tie_word_embeddings": True, "attention_bias": True}, {}),
    "llama-linear": (
        "llama",
        "Llama",
        {"rope_parameters": LINEAR},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "qwen2": ("qwen2", "Qwen2", {"tie_word_embeddings": True}, {"attention.key_length": None}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 32, "tie_word_embeddings": False}, {}),
    "gemma3": ("gemma3", "Gemma3", GEMMA, GEMMA_KEYS),
}


def _model(family: str, **shape: Any) -> Any:
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(config_class(**SHAPE | shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, which begin as ones and zeros
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def _logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(40)[None] * 7 % ROWS
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("case", CASES)
def test_a_model_comes_back_with_equal_logits(case: str, tmp_path: Path) -> None:
    architecture, family, shape, keys = CASES[case]
    model = _model(family, **shape)
    file = write_gguf(tmp_path / "m.gguf", architecture, model, filler(ROWS), keys=keys)
    written = convert(file, tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(_logits(read), _logits(model))
    assert (written.dtype, read.config.tie_word_embeddings) == ("float32", model.config.tie_word_embeddings)
    assert bool(written.notes) == (not model.config.tie_word_embeddings)
    assert read.dtype == torch.float32
    load_model(str(tmp_path / "out"), torch.float32)  # the trainer's checks


def _llama3_factors(model: Any, head: int = 32) -> np.ndarray:
    theta = model.config.rope_parameters["rope_theta"]
    plain = 1.0 / theta ** (torch.arange(0, head, 2).float() / head)
    return (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)


def test_llama_3s_factors_become_its_scaling(tmp_path: Path) -> None:
    model = _model("Llama", head_dim=32, rope_parameters=LLAMA3)
    factors = _llama3_factors(model)
    assert factors.max() == 32
    file = write_gguf(tmp_path / "m.gguf", "llama", model, filler(ROWS), tensors={"rope_freqs.weight": factors})
    convert(file, tmp_path / "out")
    read = load_model(str(tmp_path / "out"), torch.float32)
    torch.testing.assert_close(_logits(read), _logits(model), atol=1e-5, rtol=0)
    other = write_gguf(tmp_path / "n.gguf", "llama", model, filler(ROWS), tensors={"rope_freqs.weight": factors**2})
    with pytest.raises(ConfigError, match="rope_freqs.weight does not hold the factors"):
        convert(other, tmp_path / "other")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16", "F16"])
def test_quantized_matrices_are_what_the_library_reads(kind: str, tmp_path: Path) -> None:
    chosen = GGMLQuantizationType[kind]
    model = _model("Qwen2", hidden_size=128, intermediate_size=160, tie_word_embeddings=True)
    file = write_gguf(tmp_path / "m.gguf", "qwen2", model, filler(ROWS), chosen)
    assert convert(file, tmp_path / "out", "float32").dtype == "float32"
    before, after = model.state_dict(), load_model(str(tmp_path / "out"), torch.float32).state_dict()
    for name, weight in before.items():
        wanted = weight if weight.ndim == 1 else torch.from_numpy(dequantize(quantize(weight.numpy(), chosen), chosen))
        assert torch.equal(after[name], wanted), name
    default = convert(file, tmp_path / "default")
    assert default.dtype == ("float16" if kind == "F16" else "bfloat16")
    config = json.loads((tmp_path / "default" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == (default.dtype, ["Qwen2ForCausalLM"])


def test_large_models_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.trainer.tools.from_gguf.SHARD", "40KB")
    monkeypatch.setattr("skyrl.trainer.files.tensor_files.AT_ONCE", 300)
    model = _model("Llama")
    convert(write_gguf(tmp_path / "m.gguf", "llama", model, filler(ROWS)), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), _logits(model))


def _tiny_words(pre: str, **more: Any) -> tuple[Words, int]:
    """The tiny model's vocabulary, with rows that only fill up."""
    held = json.loads((model_path() / "tokenizer.json").read_text())
    tokens = [token for token, _ in sorted(held["model"]["vocab"].items(), key=lambda item: item[1])]
    special = {token["id"]: CONTROL if token["special"] else OWN for token in held["added_tokens"]}
    for token in held["added_tokens"]:
        if token["id"] >= len(tokens):
            tokens.append(token["content"])
    types = [special.get(number, NORMAL) for number in range(len(tokens))]
    rows = -(-len(tokens) // 32) * 32 + 32
    fill = range(len(tokens), rows)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in held["model"]["merges"]]
    words = Words(
        [*tokens, *(f"[PAD{number}]" for number in fill)],
        [*types, *(UNUSED for _ in fill)],
        pre=pre,
        merges=merges,
        more={"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 0, **more},
    )
    return words, rows


def test_tokens_templates_and_ends_come_out_of_the_file(tmp_path: Path) -> None:
    named = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tool_use": "{{ tools }}"}
    words, rows = _tiny_words("gpt-2", **named)
    file = write_gguf(tmp_path / "m.gguf", "llama", _model("Llama", vocab_size=rows), words)
    written = convert(file, tmp_path / "out")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "<|im_start|>user\nThe old fox, 12 times: naïve 狐?\n\n  <think>x</think><|im_end|>"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert [tokens[0], tokens[-1]] == [1, 2]
    assert len(tokens) < len(text), "merges"
    assert written.tokens == len(tokenizer) < rows
    assert tokenizer.chat_template == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["bos_token_id"]) == ([0, 2], 0)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("gpt-2", "it's 1234\n\n x", ["it", "'s", "Ġ1234", "ĊĊ", "Ġx"]),
        ("smollm", "it's 1234\n\n x", ["it", "'s", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġx"]),
        ("qwen2", "it's 1234\n\n x", ["it", "'s", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġx"]),
        ("llama-bpe", "it's 1234\n\n x", ["it", "'s", "Ġ", "123", "4", "ĊĊ", "Ġx"]),
    ],
)
def test_texts_are_cut_into_words_as_the_file_says(pre: str, text: str, parts: list[str], tmp_path: Path) -> None:
    words, rows = _tiny_words(pre)
    convert(write_gguf(tmp_path / "m.gguf", "llama", _model("Llama", vocab_size=rows), words), tmp_path / "out")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    found = [part for part, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == parts
    first = tokenizer.encode("x")[0]
    assert (first == 0) == (pre == "llama-bpe"), "Llama 3 begins each text with a token"


@pytest.mark.parametrize("prefixed", [True, False])
def test_pieces_are_those_of_sentencepiece(prefixed: bool, tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "quickstart.md"
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(page.read_text().splitlines()),
        model_writer=trained,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefixed,
        user_defined_symbols=["<think>", "\u2581\u2581", "\u2581\u2581\u2581"],
        minloglevel=2,
    )
    theirs: Any = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    numbers = range(theirs.get_piece_size())

    def kind(number: int) -> int:
        if theirs.is_unknown(number):
            return UNKNOWN
        if theirs.is_control(number):
            return CONTROL
        if theirs.is_byte(number):
            return BYTE
        return OWN if theirs.id_to_piece(number) in ("<think>", "\u2581\u2581", "\u2581\u2581\u2581") else NORMAL

    types = [kind(number) for number in numbers]
    pieces = [theirs.id_to_piece(number) for number in numbers]
    pieces = [piece.replace("\u2581", " ") if of == OWN else piece for piece, of in zip(pieces, types, strict=True)]
    keys = {f"{role}_token_id": getattr(theirs, f"{role[:3]}_id")() for role in ("bos", "eos", "unknown")}
    more = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    more |= {"tokenizer.ggml.add_space_prefix": prefixed}
    scores = [theirs.get_score(number) for number in numbers]
    words = Words(pieces, types, kind="llama", pre="default", scores=scores, more=more)
    model = _model("Llama", vocab_size=608)
    convert(write_gguf(tmp_path / "m.gguf", "llama", model, words), tmp_path / "out")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    for line in [
        *page.read_text().splitlines()[:60],
        "naïve 狐",
        *([] if prefixed else ["<think>x"]),
        "a  b   c    d      e",
        "  two",
    ]:
        expected = theirs.encode(line)
        found = tokenizer.encode(line, add_special_tokens=False)
        assert found == expected, (line, tokenizer.convert_ids_to_tokens(found), theirs.encode(line, out_type=str))
        assert tokenizer.decode(found) == theirs.decode(expected)
    assert tokenizer.encode("x")[0] == theirs.bos_id()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", "llama", _model("Llama"), filler(ROWS)).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for length in (6, 20, 200, len(whole) // 2, len(whole) - 1):
        damaged.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="damaged or cut off"):
            convert(damaged, tmp_path / "out")
    damaged.write_bytes(b"PK" + whole[2:])
    with pytest.raises(ConfigError, match="is no GGUF file"):
        convert(damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_types_without_a_formula_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", _model("Llama"), filler(ROWS), GGMLQuantizationType.Q8_0)
    monkeypatch.delitem(gguf.quants._type_traits, GGMLQuantizationType.Q8_0)
    with pytest.raises(ConfigError, match="has the type Q8_0, which cannot be dequantized"):
        convert(file, tmp_path / "out")


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = _model("Llama")
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    file = write_gguf(tmp_path / "m.gguf", "llama", model, filler(ROWS))
    with pytest.raises(ConfigError, match="output_norm.weight has numbers that are not finite"):
        convert(file, tmp_path / "out")
    with torch.no_grad():
        model.model.norm.weight[3] = 1e6
    file = write_gguf(tmp_path / "n.gguf", "llama", model, filler(ROWS))
    with pytest.raises(ConfigError, match="output_norm.weight has numbers that are too large for torch.float16"):
        convert(file, tmp_path / "large", "float16")


def test_the_commands_process_says_what_it_wrote_or_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", _model("Llama"), filler(ROWS))
    main(str(file), str(tmp_path / "out"), "bfloat16")
    assert "LlamaForCausalLM, 0.1 million weights in bfloat16, 90 tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(str(file), str(tmp_path / "out"), "")
    assert capsys.readouterr().err == f"skyrl model from-gguf: {tmp_path / 'out'} is not empty\n"
    with pytest.raises(SystemExit, match="2"):
        main(str(tmp_path / "missing"), str(tmp_path / "new"), "")
    assert "No such file" in capsys.readouterr().err


def _words(**changed: Any) -> Words:
    return dataclasses.replace(filler(ROWS), **changed)


def _refused(tmp_path: Path, sentence: str, words: Words | None = None, **given: Any) -> None:
    file = write_gguf(
        tmp_path / "m.gguf", given.pop("architecture", "llama"), _model("Llama"), words or filler(ROWS), **given
    )
    with pytest.raises(ConfigError, match=sentence):
        convert(file, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("sentence", "given"),
    [
        ("has the architecture deepseek2, which cannot be converted", {"architecture": "deepseek2"}),
        (r"has llama.attention.scale, which the conversion does not know", {"keys": {"attention.scale": 0.5}}),
        ("is a mixture of experts", {"keys": {"expert_count": 8}}),
        ("rope.scaling.type is yarn", {"keys": {"rope.scaling.type": "yarn"}}),
        ("rope.dimension_count must be the size of a head", {"keys": {"rope.dimension_count": 8}}),
        ("lacks llama.attention.layer_norm_rms_epsilon", {"keys": {"attention.layer_norm_rms_epsilon": None}}),
        (r"head_count is not one number for all layers", {"keys": {"attention.head_count": [4, 2]}}),
        (
            "model.layers.0.self_attn.q_norm.weight is .* in the file and missing",
            {"tensors": {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}},
        ),
        ("has the tensor blk.0.ssm.weight", {"tensors": {"blk.0.ssm.weight": np.ones(16, np.float32)}}),
        ("in the file and .* in the model", {"keys": {"feed_forward_length": 128}}),
        ("is one of 3 parts: join them", {"keys": {}, "words": _words(more={"split.count": 3})}),
        ("tokenizer.ggml.pre is tekken, which is not known", {"words": _words(pre="tekken")}),
        ("tokenizer.ggml.model is t5", {"words": _words(kind="t5", scores=[0.0] * ROWS)}),
        (
            "the token 96 has no row in the embedding",
            {"words": _words(tokens=[*filler(ROWS).tokens, "x"], types=[*filler(ROWS).types, NORMAL])},
        ),
        ("has a text twice", {"words": _words(tokens=["!"] * ROWS, types=[NORMAL] * ROWS)}),
        ("eos_token_id is 500, and there", {"words": _words(more={"tokenizer.ggml.eos_token_id": 500})}),
        ("merges has 'zz zz', whose texts are not all tokens", {"words": _words(merges=["zz zz"])}),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_is_not_known_is_refused_by_name(sentence: str, given: dict[str, Any], tmp_path: Path) -> None:
    _refused(tmp_path, sentence, **given)
