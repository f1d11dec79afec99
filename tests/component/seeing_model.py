"""Tiny models that see, with a tokenizer, and their logprobs as transformers and PEFT compute them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoImageProcessor, AutoModelForImageTextToText, PreTrainedTokenizerFast

from skyrl.base.pictures.decoding import opened
from skyrl.base.pictures.vision import VisionConfig
from skyrl.sampling.job import Pictures
from tests.families import IMAGE_TOKEN, PICTURE_TOKENS, VOCAB, make_family

START, END = PICTURE_TOKENS["vision_start_token_id"], PICTURE_TOKENS["vision_end_token_id"]
_NAMES = {
    START: "<|vision_start|>",
    END: "<|vision_end|>",
    IMAGE_TOKEN: "<|image_pad|>",
    PICTURE_TOKENS["video_token_id"]: "<|video_pad|>",
}
"""As vLLM and transformers look for these tokens of Qwen's."""


def make_seeing_model(family: str, directory: Path, **changed: Any) -> str:
    """`make_family`, with a tokenizer whose token 7 is the word `w7`. Returns the model's path."""
    path = make_family(family, directory, **changed)
    words = {_NAMES.get(token, f"w{token}"): token for token in range(VOCAB)}
    split = Tokenizer(WordLevel(words, unk_token="w0"))
    split.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=split,
        unk_token="w0",
        additional_special_tokens=list(_NAMES.values()),
    )
    tokenizer.save_pretrained(path)
    return path


def with_adapter(path: str, directory: Path) -> Path:
    """A LoRA adapter with random matrices on the language model, in PEFT's files. Returns where they are."""
    projections = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
    target = rf".*language_model.*\.({projections})"
    config = LoraConfig(r=4, lora_alpha=8, target_modules=target, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        get_peft_model(_load(path), config).save_pretrained(str(directory))
    return directory


def _load(path: str) -> Any:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, local_files_only=True)


class Reference:
    """A model as transformers computes it, in float32; with an adapter as PEFT computes it."""

    def __init__(self, path: str, adapter: Path | None = None) -> None:
        model = _load(path)
        self._model = model if adapter is None else PeftModel.from_pretrained(model, str(adapter))
        self._model.eval()
        self._processor = AutoImageProcessor.from_pretrained(path, local_files_only=True)

    def distributions(
        self, tokens: Sequence[int], pictures: Pictures | None, files: Mapping[str, bytes]
    ) -> npt.NDArray[np.float32]:
        """Log-probabilities [tokens - 1, vocabulary] of what follows each token."""
        ids = torch.tensor([list(tokens)])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if pictures is not None:
            images = [opened(files[picture.digest], picture.format) for picture in pictures.placed]
            inputs |= self._processor(images=images, return_tensors="pt")
            inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
        with torch.inference_mode():
            logits = self._model(**inputs).logits[0, :-1]
        return logits.log_softmax(dim=-1).numpy()

    def logprobs(
        self, tokens: Sequence[int], pictures: Pictures | None, files: Mapping[str, bytes]
    ) -> npt.NDArray[np.float32]:
        """Of each token but the first."""
        rows = self.distributions(tokens, pictures, files)
        return rows[np.arange(len(rows)), np.array(tokens[1:])]


def tokens_of_picture(path: str, width: int, height: int) -> int:
    return VisionConfig.of(path).tokens(width, height)
