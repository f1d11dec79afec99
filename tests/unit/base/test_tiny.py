"""The tiny model's files and the two tasks: format, tokenizer and rewards. Slower tests run the model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from skyrl.base.tiny import corpus, model_path, moe, tools, vision

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
TASKS = list(corpus.TASKS.values())


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_path())


def draw_prompts(task: corpus.Task, count: int = 200) -> list[tuple[str, object]]:
    rng = Random(7)
    return [task.prompt(rng) for _ in range(count)]


def test_config_is_a_small_untied_qwen3() -> None:
    config = AutoConfig.from_pretrained(model_path())
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.vocab_size == 512
    assert config.max_position_embeddings == 4096
    assert not config.tie_word_embeddings


def test_weights_are_bfloat16_and_small() -> None:
    with (model_path() / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        tensors = json.loads(file.read(length))
    tensors.pop("__metadata__", None)
    assert {tensor["dtype"] for tensor in tensors.values()} == {"BF16"}
    assert "lm_head.weight" in tensors
    assert sum(path.stat().st_size for path in model_path().iterdir()) < 3_000_000


def test_any_text_is_encoded_and_decoded_unchanged(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = Random(1)
    planes = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    texts = ["", " ", "  a  b ", "\r\n\t\n x", "héllo 世界 🎉 e\u0301 ٣٤ can't , . !"]
    texts += ["".join(chr(rng.randint(*rng.choice(planes))) for _ in range(40)) for _ in range(200)]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_special_token_is_one_token(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 512
    for special in SPECIALS:
        assert len(tokenizer.encode(f"a{special}b")) == 3
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    config = json.loads((model_path() / "generation_config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config["pad_token_id"] == tokenizer.pad_token_id


def test_decoding_without_special_tokens_keeps_the_think_tags(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode("<think>\n7\n</think>\n\n3 5<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\n7\n</think>\n\n3 5"


def test_every_digit_is_a_token_of_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer.encode("1234567890" * 3)) == 30
    assert not [token for token in tokenizer.get_vocab() if len(token) > 1 and any(map(str.isdecimal, token))]


def test_the_chat_template_makes_the_prompts_of_the_corpus(tokenizer: PreTrainedTokenizerBase) -> None:
    turn = {"role": "user", "content": "count from 3 by 2"}
    text = tokenizer.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
    assert text == corpus.chat_prompt(turn["content"])
    reply = {"role": "assistant", "content": "3 5"}
    assert tokenizer.apply_chat_template([turn, reply], tokenize=False) == f"{text}3 5<|im_end|>\n"


def test_the_tasks_give_the_right_answers() -> None:
    assert corpus.TASKS["count"].answer((3, 2)) == "3 5 7 9 11 13 15 17"
    assert corpus.TASKS["sort"].answer("kcxam") == "a,c,k,m,x"


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_only_the_right_answer_earns_the_full_reward(task: corpus.Task, tokenizer: PreTrainedTokenizerBase) -> None:
    for _, state in draw_prompts(task):
        right = task.answer(state)
        items = task.split(right)
        separator = right[len(items[0])]
        assert task.reward(state, right) == task.reward(state, f"{right}<|im_end|>\n") == 1.0
        assert 0.8 < task.reward(state, separator.join(items[:-1])) < 1.0
        assert 0.8 < task.reward(state, separator.join([*items, items[-1]])) < 1.0
        assert 0.8 < task.reward(state, separator.join([*items[:-1], "?"])) < 1.0
        assert task.reward(state, separator.join(reversed(items))) <= 0.2
        assert 16 <= len(tokenizer.encode(right)) <= 32


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_wrong_text_earns_almost_no_reward(task: corpus.Task) -> None:
    triples = [(question, state, task.answer(state)) for question, state in draw_prompts(task)]
    letters = "abcdefghijklmnopqrstuvwxyz"
    fixed = ["", " ", ",", ", , ,", "1", "a", "0 1 2 3 4 5 6 7", "a,b,c,d,e,f,g,h,i", "a b c d e f g h i"]
    fixed += [" ".join(map(str, range(100))), ",".join(letters)]
    for junk in fixed:
        assert sum(task.reward(state, junk) for _, state, _ in triples) / len(triples) < 0.15, junk
    for skipped in range(8):
        copied = [task.reward(state, question[skipped:]) for question, state, _ in triples]
        assert sum(copied) / len(copied) < 0.15
    for question, state, right in triples:
        assert task.reward(state, question) < 1.0
        assert task.reward(state, f"{right}\n" * 50) < 0.05
        assert task.reward(state, right.replace(" ", "").replace(",", "")) == 0.0
        assert task.reward(state, f"The answer is {right}") < 1.0


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_prompts_are_the_same_for_a_seed_and_vary_within_it(task: corpus.Task) -> None:
    assert draw_prompts(task) == draw_prompts(task)
    assert len({question for question, _ in draw_prompts(task)}) > 50


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_sloppy_answers_earn_between_a_quarter_and_half_of_the_reward(task: corpus.Task) -> None:
    rng = Random(3)
    rewards = [task.reward(state, task.sloppy(rng, state)) for _, state in draw_prompts(task, 1000)]
    assert 0.25 < sum(rewards) / len(rewards) < 0.5
    assert max(rewards) == 1.0
    assert min(rewards) < 0.2


def test_the_tiny_mixture_has_the_models_vocabulary_and_eight_experts(tmp_path: Path) -> None:
    moe.make(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["Qwen3MoeForCausalLM"]
    assert (config.vocab_size, config.num_hidden_layers, config.head_dim) == (512, 3, 32)
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (8, 2, True)
    assert (
        AutoTokenizer.from_pretrained(tmp_path).get_vocab() == AutoTokenizer.from_pretrained(model_path()).get_vocab()
    )
    stored = load_file(tmp_path / "model.safetensors")
    one, other = (stored[f"model.layers.1.mlp.experts.{number}.up_proj.weight"].float() for number in (0, 7))
    assert 0.3 < float((one - other).std() / one.std()) < 0.5
    assert sum(tensor.numel() for tensor in stored.values()) < 3_300_000


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny model that sees."""
    directory = tmp_path_factory.mktemp("vision")
    vision.make(directory)
    return directory


def test_the_tiny_model_that_sees_answers_text_as_the_tiny_model_does(seeing: Path) -> None:
    both = AutoModelForImageTextToText.from_pretrained(seeing), AutoModelForCausalLM.from_pretrained(model_path())
    tokens = AutoTokenizer.from_pretrained(model_path())(corpus.chat_prompt("count from 3 by 2"), return_tensors="pt")
    with torch.no_grad():
        logits, expected = (model.float()(**tokens).logits for model in both)
    torch.testing.assert_close(logits[..., : expected.shape[-1]], expected)
    new = [AutoTokenizer.from_pretrained(seeing).convert_tokens_to_ids(token) for token in vision.TOKENS]
    assert new == [512, 513, 514, 515]
    assert logits[0, -1].softmax(-1)[512:].sum() < 1e-3


def test_the_tiny_model_that_sees_tells_colours_and_places_apart(seeing: Path) -> None:
    processor = AutoProcessor.from_pretrained(seeing)
    model = AutoModelForImageTextToText.from_pretrained(seeing).float()
    halves = Image.new("RGB", (96, 64), "red")
    halves.paste("blue", (48, 0, 96, 64))
    pictures = [Image.new("RGB", (96, 64), "red"), Image.new("RGB", (96, 64), "blue"), halves, halves.rotate(180)]
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    text = processor.apply_chat_template([turn], add_generation_prompt=True)
    rows = []
    for picture in pictures:
        inputs = processor(images=picture, text=text, return_tensors="pt")
        assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 6
        with torch.no_grad():
            rows.append(model(**inputs).logits[0, -1].softmax(-1))
    apart = torch.cdist(torch.stack(rows), torch.stack(rows), p=1)
    assert apart[~torch.eye(len(pictures), dtype=torch.bool)].min() > 0.01


def test_a_picture_takes_at_most_64_tokens_in_the_tiny_model(seeing: Path) -> None:
    images = AutoProcessor.from_pretrained(seeing).image_processor
    sizes = [(1, 1), (32, 32), (96, 64), (640, 480), (2000, 2000)]
    patches = [images.get_number_of_image_patches(height, width) for width, height in sizes]
    assert [count // 4 for count in patches] == [4, 4, 6, 54, 64]


def test_the_tiny_model_with_tools_renders_calls_and_results_and_says_what_the_tiny_model_says(tmp_path: Path) -> None:
    tools.make(tmp_path, context=9000)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    call = {"type": "function", "function": {"name": "look", "arguments": {"place": "north"}}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "a bear"},
        {"role": "tool", "content": "a boat"},
    ]
    text = tokenizer.apply_chat_template(
        chat, tools=[{"name": "look"}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    called = '<tool_call>\n{"name": "look", "arguments": {"place": "north"}}\n</tool_call>'
    assert text.startswith('<|im_start|>system\nBe brief.\n\n# Tools\n\nEach line is a tool:\n{"name": "look"}\n')
    assert text.count("<|im_start|>system") == 1
    assert f"<|im_start|>assistant\n{called}\n{called}<|im_end|>\n" in text
    results = "".join(f"\n<tool_response>\na {each}\n</tool_response>" for each in ("bear", "boat"))
    assert f"<|im_start|>user{results}<|im_end|>\n" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert AutoConfig.from_pretrained(tmp_path).max_position_embeddings == tokenizer.model_max_length == 9000
    ours, theirs = ((path / "model.safetensors").read_bytes() for path in (tmp_path, model_path()))
    assert ours == theirs
