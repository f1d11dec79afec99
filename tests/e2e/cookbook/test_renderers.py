"""The renderer that the cookbook recommends for each model that trains here: supervised training, then `math_rl`.

A renderer goes by the model's name alone. The server has the name of the released model for a tiny model of its family
with random weights, and the recipes find everything else as users do. Supervised training moves the policy, and
`math_rl` goes on from its checkpoint, so that its first samples come from a policy that is not the base model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from inference.test_families_vllm import MODELS as MODELS_IN_VLLM
from inference.test_families_vllm import as_released

from skyrl.cli.demo.server import DemoServer
from tests.architectures import cookbook, figures
from tests.architectures.page import Verdict, family_of, verdicts
from tests.environments import ROOT, environment
from tests.families import make_family
from tests.servers import ready

from .conftest import CHATS
from .renderer_tokens import write_tokenizer
from .workspace import Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

STAND_IN = "qwen3"
"""The tiny model that has the names of a family that vLLM does not serve on a CPU: the renderer goes by the name."""
AGREE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Bound on the mean difference of a token's logprob between sampler and trainer, by vLLM's type."""
VOCABULARY = 576
KEPT = figures.read()


def _served_type(family: str) -> str | None:
    """The type that vLLM computes the family's tiny model in, here; None if it does not serve the family."""
    return KEPT[family].get("vllm", {}).get("dtype")


def _chosen() -> dict[str, list[Verdict]]:
    """By the family of the tiny model: one model of the cookbook for each renderer that is recommended first."""
    found = {each.renderer: each for each in reversed(verdicts(KEPT, cookbook.listed())) if each.trains}
    chosen: dict[str, list[Verdict]] = {}
    for each in reversed(found.values()):
        family = family_of(each.model_type)
        chosen.setdefault(family if family and _served_type(family) else STAND_IN, []).append(each)
    return chosen


CHOSEN = _chosen()
MODELS = [(family, each) for family, models in CHOSEN.items() for each in models]


@pytest.fixture(scope="module")
def recipes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A workspace on a server that has the tiny model of a family under the names of all its models in `CHOSEN`."""
    family: str = request.param
    directory = tmp_path_factory.mktemp("renderers")
    _, settings = MODELS_IN_VLLM[family]
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 4096}
    path = Path(make_family(family, directory, **{**settings, **sizes}))
    as_released(family, path)
    assert write_tokenizer(path) == VOCABULARY
    names = [each.model for each in CHOSEN[family]]
    flags = ["--base-model", str(path), *(part for name in names for part in ("--served-model-name", name))]
    python = environment(ROOT / "requirements" / "cookbook.txt")
    sees = "vision_config" in json.loads((path / "config.json").read_text())
    backend = {"generator.inference_engine.engine_init_kwargs": {"language_model_only": True}} if sees else {}
    with ready(DemoServer(directory / "server", *flags, backend_config=backend)) as server:
        yield Workspace(directory / "cookbook", python, server.url, path, names)


@pytest.mark.parametrize(
    ("recipes", "verdict"), MODELS, indirect=["recipes"], ids=[each.renderer for _, each in MODELS]
)
def test_a_renderer_trains_and_sampler_and_trainer_agree(
    request: pytest.FixtureRequest, recipes: Workspace, verdict: Verdict
) -> None:
    name, bound = verdict.renderer, AGREE[_served_type(request.node.callspec.params["recipes"]) or ""]
    tuned = recipes.run("chat_sl.train", f"{name}-sl", *CHATS, "max_steps=6", model=verdict.model)
    assert f'"renderer_name": "{name}"' in (tuned.path / "config.json").read_text()
    loss = tuned.column("train_mean_nll")
    assert loss[-1] < 0.9 * loss[0]
    start = f"load_checkpoint_path={tuned.checkpoints[-1]['state_path']}"
    options = ("env=arithmetic", "groups_per_batch=4", "group_size=4", "max_tokens=6", "max_steps=2", start)
    loss_fn = ("loss_fn=importance_sampling", "learning_rate=1e-3")
    learned = recipes.run("math_rl.train", f"{name}-rl", *options, *loss_fn, model=verdict.model)
    apart = learned.column("optim/kl_sample_train_v1")
    print(f"{verdict.model}: {name}, sampler and trainer differ by {max(map(abs, apart)):.0e}")
    assert len(apart) == 2
    assert all(abs(step) < bound for step in apart)
    assert all(map(math.isfinite, learned.column("env/all/reward/total")))
