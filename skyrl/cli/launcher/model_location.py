"""Whether a base model is on this machine or on the model hub, before any process loads it.

Looks at names of files and asks the hub. Imports neither torch nor transformers, and reads no weights: whether the
model can be trained or served is only known when the trainer and vLLM load it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from pathlib import Path

import httpx

from skyrl.base.config.server import ConfigError

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
_REDIRECTIONS = 10
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_YES = ("1", "on", "yes", "true")
_WEIGHTS = ("*.safetensors", "*.bin")


def check_model(path_or_name: str) -> bool:
    """Returns whether all processes take the model from this machine and need not ask the model hub.

    Raises ConfigError when there is no such directory or hub name, or when the directory holds no model."""
    try:
        if Path(path_or_name).exists():
            _check_directory(Path(path_or_name))
            return True
    except OSError as error:  # no permission, a path that is too long
        raise ConfigError(f"{path_or_name!r} cannot be read: {error}") from error
    if _HUB_NAME.fullmatch(path_or_name) is None:
        raise ConfigError(f"there is no directory {path_or_name!r} (looked in {Path.cwd()}), and it is no hub name")
    return _check_hub(path_or_name)


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise ConfigError(f"{directory} is a file; give the directory that holds the model's config.json")
    if not any(directory.iterdir()):
        raise ConfigError(f"the directory {directory} is empty; a model's has a config.json and weights")
    description = directory / "config.json"
    if not description.is_file():
        raise ConfigError(f"the directory {directory} holds no model: it has no config.json")
    try:
        model_config = json.loads(description.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{description} cannot be read: {error}") from error
    if not isinstance(model_config, dict):
        raise ConfigError(f"{description} does not describe a model: it is no JSON object")
    if not any(True for pattern in _WEIGHTS for _ in directory.glob(pattern)):
        raise ConfigError(f"the directory {directory} holds no weights ({' or '.join(_WEIGHTS)})")


def _check_hub(name: str) -> bool:
    """Returns whether the model must come from the local cache, because the hub does not give it. Raises ConfigError
    when the cache does not have it either."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        raise ConfigError(f"there is no directory {name!r} in {Path.cwd()}; as a hub name: {error}") from error
    trouble = _ask_hub(name)
    if trouble is None:
        return False
    if cached:
        logger.warning("%s is taken from the local cache: %s", name, trouble)
        return True
    where = f"there is no directory {name!r} in {Path.cwd()}, and {trouble}"
    raise ConfigError(f"{where}; give a directory that holds the model, or a name that the hub knows")


def _ask_hub(name: str) -> str | None:
    """Why the hub does not give the model; None when it does. None also when the hub answers with an error of its own,
    because that may be over when the model is loaded."""
    from huggingface_hub import constants, get_token

    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").lower() in _YES:
            return f"{variable} is set, so that the model hub is not asked"
    url = f"{constants.ENDPOINT}/{name}/resolve/main/config.json"
    token = get_token()
    answers: list[httpx.Response | Exception] = []

    def ask() -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            answers.append(_head(url, headers))
        except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError) as error:  # the last two: a bad proxy URL
            answers.append(error)

    # On a thread, because a DNS look-up has no timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    if not answers:
        return f"the model hub {constants.ENDPOINT} gave no answer in {HUB_TIMEOUT_S:.0f} s"
    answer = answers[0]
    if isinstance(answer, Exception):
        return f"the model hub {constants.ENDPOINT} cannot be reached ({answer})"
    return _why_refused(answer)


def _head(url: str, headers: dict[str, str]) -> httpx.Response:
    """The hub's answer. Redirections within the hub are followed. A redirection to another host, such as a mirror's
    object store, is returned: it shows that the hub has the model."""
    with httpx.Client(headers=headers, timeout=HUB_TIMEOUT_S) as client:
        answer = client.head(url)
        for _ in range(_REDIRECTIONS):
            if answer.next_request is None or answer.next_request.url.host != answer.request.url.host:
                break
            answer = client.send(answer.next_request)
        return answer


def _why_refused(answer: httpx.Response) -> str | None:
    code = answer.headers.get("x-error-code")
    if code == "GatedRepo":
        return "the hub gives that model only to those who accepted its terms: do so, and set HF_TOKEN"
    if code == "EntryNotFound":
        return "the hub's repository of that name has no config.json"
    if code == "RepoNotFound" or answer.status_code in (401, 404):
        return "the hub has no model of that name (or it is private, and HF_TOKEN does not open it)"
    return None
