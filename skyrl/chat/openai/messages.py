"""The messages of a chat: checked, and as chat templates take them.

vLLM fetches images, audio and video from the addresses in a message. So only parts with text go on, and pictures that
are in the request itself, as a data URI. No address is opened, here or by the inference server, which gets
pictures that were decoded here before, and no key that vLLM would ignore. `ChatPictures` counts the tokens that
pictures take.

System messages: every template must show them to the model. Agents send several: Codex two messages of the role
`developer`, Claude Code one of the role `system` between others. Many templates take one system message, and at the
beginning only: they refuse any other, or leave it out. So the messages of a chat change on their way to the template:

- The system messages before all others become one.
- A later one becomes a part of the user's turn that it stands in: of the message or tool result before it, or, right
  after an answer, of the message behind it. What was rendered before it stays as it was.
- A template without the role gets the first system message in front of the first user's message.

`developer` is another name for `system`.

`reasoning_effort`: some templates take a part of its values alone. Tencent's Hy3 takes `high`, `low` and `no_think`,
and refuses a chat with another value; Codex asks for `medium`. Such a template gets the nearest value that it takes.

Renderers: a checkpoint that was trained with the cookbook has seen the prompts of a renderer, and a chat is rendered
with the model's own template. `difference` says where the two differ; compared were tinker-cookbook 0.6.1 and the
released templates (docs/howto/openai.md).

Knows templates by their text, and renders none. Knows neither dialects, nor tenants, nor how a request is sent.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache

from skyrl.base.pictures.picture import MAX_PICTURES, BadPicture, PictureFormat, digest_of
from skyrl.base.pictures.vision import NoVision, VisionConfig
from skyrl.base.wire.decoding import decode_base64
from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai.fields import checked_tool_calls, without_echoes
from skyrl.sampling.pictures import PictureChecks

PICTURE = "image_url"
"""The type of a part with a picture, and its key."""
MAX_REMEMBERED = 10_000
"""Pictures whose size is remembered: the turns of a conversation send the same pictures again."""
_DETAILS = ("auto", "low", "high")
_DATA_URI = re.compile(r"data:image/(png|jpe?g);base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ChatPicture:
    """`name` is the picture's place in the request."""

    name: str
    format: PictureFormat
    base64: str

    @property
    def part(self) -> dict[str, Any]:
        """For the inference server."""
        return {"type": PICTURE, PICTURE: {"url": f"data:image/{self.format};base64,{self.base64}"}}


def picture_in(part: dict[str, Any], place: str) -> ChatPicture:
    """The picture of a part of a message. `detail` has no effect: the model's own processor decides how a picture is
    resized. Raises RequestError."""
    name = f"{place}.{PICTURE}"
    if unknown := part.keys() - {"type", PICTURE}:
        raise RequestError("is not a field that this server knows", field=f"{place}.{min(unknown)}")
    given = part.get(PICTURE)
    if not isinstance(given, dict) or not isinstance(url := given.get("url"), str):
        raise RequestError("must be an object with a url", field=name)
    if unknown := given.keys() - {"url", "detail"}:
        raise RequestError("is not a field that this server knows", field=f"{name}.{min(unknown)}")
    if given.get("detail", "auto") not in _DETAILS:
        raise RequestError(f"must be one of {', '.join(_DETAILS)}", field=f"{name}.detail")
    kind = _DATA_URI.match(url)
    if kind is None:
        raise RequestError(
            "must begin with 'data:image/png;base64,' or 'data:image/jpeg;base64,': this server opens no address",
            field=name,
        )
    return ChatPicture(name, "png" if kind[1].lower() == "png" else "jpeg", url[kind.end() :])


class ChatPictures:
    """Checks the pictures of chats. Belongs to one event loop."""

    def __init__(self, checks: PictureChecks, sight: VisionConfig | NoVision) -> None:
        self._checks = checks
        self._sight = sight
        self._sizes: LRUCache[tuple[str, PictureFormat], tuple[int, int]] = LRUCache(MAX_REMEMBERED)

    async def tokens(self, pictures: Sequence[ChatPicture]) -> int:
        """How many tokens of the prompt the pictures take together. Raises RequestError naming the picture: 400 for a
        file that is no picture or that the model does not take, 429 if too many pictures wait for their check."""
        if isinstance(self._sight, NoVision):
            kind = f"{pictures[0].name.removesuffix(f'.{PICTURE}')}.type"
            raise RequestError(f"must be 'text': the base model takes no images: {self._sight}", field=kind)
        if len(pictures) > MAX_PICTURES:
            name = pictures[MAX_PICTURES].name
            raise RequestError(f"a chat holds {len(pictures)} images and may hold {MAX_PICTURES}", field=name)
        return sum([await self._tokens_of(picture, self._sight) for picture in pictures])

    async def _tokens_of(self, picture: ChatPicture, sight: VisionConfig) -> int:
        try:
            return sight.tokens(*await self._size(picture))
        except BadPicture as error:
            raise RequestError(str(error), field=picture.name) from error

    async def _size(self, picture: ChatPicture) -> tuple[int, int]:
        data, digest = await asyncio.to_thread(_read, picture.base64)
        key = digest, picture.format
        size = self._sizes.get(key) or await self._checks.size(data, picture.format)
        self._sizes[key] = size
        return size


def _read(text: str) -> tuple[bytes, str]:
    """The file and its digest. Raises BadPicture."""
    try:
        data = decode_base64(text)
    except ValueError as error:
        raise BadPicture(f"is not base64: {error}") from error
    return data, digest_of(data)


_KEYS = frozenset(
    {"content", "name", "reasoning", "reasoning_content", "refusal", "role", "tool_call_id", "tool_calls"}
)
_PART_KEYS = {"text": "text", "refusal": "refusal"}
"""Types of parts, and the key of each that holds its text."""
_TEXTS = ("name", "reasoning", "reasoning_content", "refusal", "tool_call_id")
TEMPLATE_KEYS = frozenset(
    {"add_generation_prompt", "continue_final_message", "conversation", "documents", "messages", "reasoning_effort"}
    | {"chat_template", "max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"}
    | {"processor_kwargs", "self", "tokenize", "tokenizer", "tokenizer_kwargs", "tools", "truncation"}
)
"""Arguments that have fields of their own, or that the renderer of the template takes instead of the template."""


def checked_messages(
    messages: Sequence[dict[str, Any]], first: int = 0
) -> tuple[list[dict[str, Any]], tuple[ChatPicture, ...]]:
    """The messages without empty keys, which clients send when they repeat an answer, and their pictures, which are not
    checked yet. `first` is the number of the first of them in the request. Raises RequestError."""
    if not messages:
        raise RequestError("must hold at least one message", field="messages")
    pictures: list[ChatPicture] = []
    checked = [_checked(message, f"messages[{index}]", pictures) for index, message in enumerate(messages, first)]
    return checked, tuple(pictures)


def _checked(message: dict[str, Any], place: str, pictures: list[ChatPicture]) -> dict[str, Any]:
    """Adds the message's pictures to `pictures`."""
    given = without_echoes(message)
    kept = {key: value for key, value in given.items() if key == "content" or value not in (None, [])}
    if unknown := kept.keys() - _KEYS:
        raise RequestError("is not a field that this server knows", field=f"{place}.{min(unknown)}")
    for key in ("role", *(key for key in _TEXTS if key in kept)):
        if not isinstance(kept.get(key), str):
            raise RequestError("must be a string", field=f"{place}.{key}")
    if "tool_calls" in kept:
        kept["tool_calls"] = checked_tool_calls(kept["tool_calls"], f"{place}.tool_calls")
    content = kept.get("content")
    if isinstance(content, list):
        kept["content"] = [
            _checked_part(part, f"{place}.content[{index}]", pictures) for index, part in enumerate(content)
        ]
    elif content is not None and not isinstance(content, str):
        raise RequestError("must be a string or a list of parts", field=f"{place}.content")
    return kept


def _checked_part(part: Any, place: str, pictures: list[ChatPicture]) -> dict[str, Any]:
    part = without_echoes(part)
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == PICTURE:
        pictures.append(picture_in(part, place))
        return pictures[-1].part
    key = _PART_KEYS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise RequestError("must be 'text' or 'image_url'", field=f"{place}.type")
    if not isinstance(part.get(key), str):
        raise RequestError("must be a string", field=f"{place}.{key}")
    if unknown := part.keys() - {"type", key}:
        raise RequestError("is not a field that this server knows", field=f"{place}.{min(unknown)}")
    return part


def check_template_arguments(arguments: dict[str, Any] | None) -> None:
    """Raises RequestError for an argument that would replace the model's own template, or has a field of its own."""
    if taken := (arguments or {}).keys() & TEMPLATE_KEYS:
        raise RequestError("cannot be set here", field=f"chat_template_kwargs.{min(taken)}")


ROLES = ("system", "developer")
SEPARATOR = "\n\n"
"""Between two texts that become one; vLLM joins system messages in the same way."""


def for_template(messages: Sequence[Mapping[str, Any]], *, begins: bool = True) -> list[dict[str, Any]]:
    """The checked messages of a chat as a template gets them. `begins` is False for messages that follow an answer:
    none of them is the chat's first."""
    first, rest = _leading(messages) if begins else ([], messages)
    placed = _placed(rest)
    if not first:
        return placed
    return [{"role": "system", "content": _joined([message.get("content") for message in first])}, *placed]


def without_the_role(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `for_template` gives, for a template that knows no system messages."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, *rest = messages
    if not rest or rest[0]["role"] == "assistant":
        return [system | {"role": "user"}, *rest]
    return [rest[0] | {"content": _joined([system["content"], rest[0].get("content")])}, *rest[1:]]


def _leading(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """The system messages at the beginning, and the others."""
    count = next((at for at, message in enumerate(messages) if message["role"] not in ROLES), len(messages))
    return messages[:count], messages[count:]


def _placed(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with each system message inside a user's turn."""
    placed: list[dict[str, Any]] = []
    waiting: list[Any] = []
    """Contents of system messages that follow an answer."""
    for message in messages:
        if message["role"] in ROLES:
            if placed and placed[-1]["role"] != "assistant":
                placed[-1] = placed[-1] | {"content": _joined([placed[-1].get("content"), message.get("content")])}
            else:
                waiting.append(message.get("content"))
            continue
        made = dict(message)
        if waiting and made["role"] == "assistant":  # an answer follows an answer
            placed.append({"role": "user", "content": _joined(waiting)})
        elif waiting:
            made["content"] = _joined([*waiting, made.get("content")])
        waiting = []
        placed.append(made)
    return [*placed, {"role": "user", "content": _joined(waiting)}] if waiting else placed


def _joined(contents: Sequence[Any]) -> str | list[dict[str, Any]]:
    """One content made of several. Texts are one text; with pictures among them all are parts."""
    given = [content for content in contents if content]
    if len(given) == 1:
        return given[0]
    parts = [part for content in given for part in _parts(content)]
    if any(part["type"] not in ("text", "refusal") for part in parts):
        return parts
    return SEPARATOR.join(text for content in given if (text := _text(content)))


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(content: str | list[dict[str, Any]]) -> str:
    """vLLM joins the texts of a message with a line feed."""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)


EFFORT_FIELDS = ("reasoning_effort", "chat_template_kwargs")
"""The fields of a chat that say it."""
_ORDER = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""OpenAI's values, by how long a model thinks."""
_SAME = {"no_think": "none"}
"""Other names that templates have for them."""
_TAKEN = re.compile(r"\breasoning_effort\s+not\s+in\s+[\[(]([^\])]*)[\])]")
_VALUE = re.compile(r"""['"]([^'"]+)['"]""")


def efforts_of(template: str | None) -> Sequence[str]:
    """The values that a template says it takes, in its own words; none if it takes any, or has no such argument."""
    found = _TAKEN.search(template or "")
    values = [] if found is None else _VALUE.findall(found[1])
    return [value for value in values if _SAME.get(value, value) in _ORDER]


def with_taken_effort(fields: Mapping[str, Any], taken: Sequence[str]) -> Mapping[str, Any]:
    """The decoded fields of a chat with `reasoning_effort` as the template takes it: the nearest value, of two the
    higher one. It then stands in `chat_template_kwargs`, because vLLM knows OpenAI's values alone. What a client gives
    there itself stays."""
    effort, given = fields.get("reasoning_effort"), fields.get("chat_template_kwargs") or {}
    if not taken or effort not in _ORDER or effort in taken or "reasoning_effort" in given:
        return fields
    wanted = _ORDER.index(effort)
    ranks = {value: _ORDER.index(_SAME.get(value, value)) for value in taken}
    nearest = min(taken, key=lambda value: (abs(ranks[value] - wanted), -ranks[value]))
    arguments = {"enable_thinking": ranks[nearest] > 0} | given | {"reasoning_effort": nearest}
    return {name: value for name, value in fields.items() if name != "reasoning_effort"} | {
        "chat_template_kwargs": arguments
    }


LLAMA = (
    "the template begins each chat with a system message about dates, and cuts blanks off texts; the renderer llama3 "
    "does neither"
)
GPT_OSS = (
    "the template begins each chat with a system message, which the renderer gpt_oss_no_sysprompt leaves out; it also "
    "writes tools' calls and results otherwise, and drops earlier thoughts"
)
QWEN3 = "the template writes the results of several calls into one user's turn, the renderers of Qwen3 one for each"
_LLAMA_DATES = "Cutting Knowledge Date"
_QWEN3 = ("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe")


def difference(model_type: str, template: str | None) -> str | None:
    """How the template of a model differs from the cookbook's renderers, as a sentence; None if it is not known to.
    `model_type` is that of config.json."""
    if model_type == "gpt_oss":
        return GPT_OSS
    if template is None:
        return None
    if model_type == "llama" and _LLAMA_DATES in template:
        return LLAMA
    return QWEN3 if model_type in _QWEN3 and "<tool_response>" in template else None
