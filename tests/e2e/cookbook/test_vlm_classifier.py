"""The cookbook's classifier of pictures, unmodified, with the tiny model that sees and a data set drawn on the spot.

The recipe samples from pictures to measure its accuracy, and scores answers to pictures with the sampler.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer

from skyrl.base.pictures.vision import VisionConfig
from skyrl.cli.demo.server import DemoServer
from tests.environments import ROOT, environment

from ..conftest import SEEING_ALIAS
from .pictures import COLOURS, HEIGHT, WIDTH, draw, write_dataset
from .workspace import KEY, Run, Workspace, kill_after_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

LEARNS = ("renderer_name=qwen3_vl_instruct", "batch_size=8", "learning_rate=5e-3", "num_epochs=12")
"""96 steps over 64 pictures."""
AGREE = 1e-4
"""Bound on the mean difference of a token's logprob between sampler and trainer, both in float32."""
ANSWER = "The subject in this photo is: {}\n<|im_end|>"
"""What the recipe trains, as the renderer writes it."""


@pytest.fixture(scope="module")
def model(seeing: DemoServer) -> Path:
    return seeing.state_dir.parent / "model"


@pytest.fixture(scope="module")
def gallery(seeing: DemoServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    python = environment(ROOT / "requirements" / "cookbook.txt")
    made = Workspace(tmp_path_factory.mktemp("gallery"), python, seeing.url, model, (SEEING_ALIAS,))
    write_dataset(made.root, train=16, test=4)
    return made


@pytest.fixture(scope="module")
def learned(gallery: Workspace) -> Run:
    return gallery.run("vlm_classifier.train", "learned", *LEARNS, "eval_every=90", "n_eval=16")


@pytest.fixture(scope="module")
def blind_loss(model: Path) -> float:
    """The least mean loss of a model that does not see, in nats: it is certain of all but the colour."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    answers = [len(tokenizer.encode(ANSWER.format(colour))) for colour in COLOURS]
    return math.log(len(COLOURS)) / float(np.mean(answers))


def test_the_classifier_learns_to_name_what_it_sees(learned: Run, blind_loss: float) -> None:
    loss = learned.column("train_mean_nll")
    assert len(loss) == 96
    assert loss[-1] < loss[0] / 10
    assert loss[-1] < blind_loss / 2
    before, after = learned.column("accuracy")
    assert before < 0.5 < 0.8 < after
    learned.shows(
        "the model that sees learns four colours; sampler and trainer agree; a killed run resumes",
        data="`dpdl-benchmark/caltech101`: a folder for each split, and in it one for each class",
        accuracy=(before, after),
        loss=(loss[0], loss[-1]),
    )


def test_the_samplers_scores_of_answers_to_pictures_fall_with_the_loss(learned: Run, blind_loss: float) -> None:
    before, after = learned.column("test/nll")
    assert after < blind_loss / 2 < before


def prompt(model: Path, colour: str, rng: Random) -> types.ModelInput:
    """The recipe's question about a new picture of this colour."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    file = io.BytesIO()
    draw(colour, rng).save(file, "PNG")
    before = tokenizer.encode("<|im_start|>user\n<|vision_start|>")
    asked = "<|vision_end|>What is the name of the subject in this photo?<|im_end|>\n<|im_start|>assistant\n"
    chunks: list[types.ModelInputChunk] = [
        types.EncodedTextChunk(tokens=before),
        types.ImageChunk(
            data=file.getvalue(), format="png", expected_tokens=VisionConfig.of(str(model)).tokens(WIDTH, HEIGHT)
        ),
        types.EncodedTextChunk(tokens=tokenizer.encode(f"{asked}The subject in this photo is:")),
    ]
    return types.ModelInput(chunks=chunks)


@pytest.fixture
def service(seeing: DemoServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=seeing.url, api_key=KEY) as client:
        yield client


def test_sampler_and_trainer_agree_on_answers_to_pictures(
    learned: Run, model: Path, service: tinker.ServiceClient
) -> None:
    saved = learned.checkpoints[0]  # the policy is still unsure then: its logprobs are far from 0
    sampler = service.create_sampling_client(model_path=saved["sampler_path"]).result()
    trainer = service.create_training_client_from_state(saved["state_path"]).result()
    rng, params = Random(9), types.SamplingParams(max_tokens=6, temperature=1.0, seed=1, stop=[])
    data, sampled = [], []
    for colour in COLOURS:
        asked = prompt(model, colour, rng)
        for answer in sampler.sample(asked, 4, params).result().sequences:
            data.append(_answered(asked, list(answer.tokens)))
            sampled.append(answer.logprobs)
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    trained = [output["logprobs"].to_numpy()[-6:] for output in outputs]
    assert np.concatenate(sampled).min() < -1
    apart = np.abs(np.concatenate(trained) - np.concatenate(sampled))
    print(f"sampler and trainer differ by {apart.mean():.0e} on average, by {apart.max():.0e} at most")
    assert apart.mean() < AGREE


def _answered(asked: types.ModelInput, answer: list[int]) -> types.Datum:
    """The answer after the prompt, with a weight on its tokens alone."""
    given = types.ModelInput(chunks=[*asked.chunks, types.EncodedTextChunk(tokens=answer[:-1])])
    inputs = {
        "target_tokens": np.asarray([0] * (asked.length - 1) + answer, np.int64),
        "weights": np.asarray([0.0] * (asked.length - 1) + [1.0] * len(answer), np.float32),
    }
    tensors = {name: types.TensorData.from_numpy(values) for name, values in inputs.items()}
    return types.Datum(model_input=given, loss_fn_inputs=tensors)


def test_a_killed_run_resumes_at_its_last_checkpoint(gallery: Workspace) -> None:
    options = (*LEARNS, "save_every=10", "eval_every=0")
    run, process = gallery.start("vlm_classifier.train", "killed", *options)
    kill_after_checkpoint(run, process)
    saved = run.checkpoints[-1]
    first = run.column("train_mean_nll")[0]
    done = saved.get("epoch", 0) * 8 + saved["batch"]
    gallery.run(
        "vlm_classifier.train", "killed", *options, f"max_steps={done + 2}", "behavior_if_log_dir_exists=resume"
    )
    assert run.column("step") == list(range(done + 2))
    # A run that started anew would show the first loss and the optimizer's first step.
    assert max(run.column("train_mean_nll")[done:]) < 0.2 * first
    assert run.column("optimizer_step")[done] > done


def test_a_checkpoint_is_the_start_of_another_run(gallery: Workspace, learned: Run, blind_loss: float) -> None:
    start = f"load_checkpoint_path={learned.checkpoints[-1]['state_path']}"
    run = gallery.run("vlm_classifier.train", "loaded", *LEARNS, "max_steps=2", "eval_every=90", "n_eval=16", start)
    assert run.column("train_mean_nll")[0] < blind_loss / 2
    assert run.column("accuracy")[0] > 0.8


RENDERED = """
import sys
import numpy as np
import tinker
from PIL import Image
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.tokenizer_utils import get_tokenizer

model, *names = sys.argv[1:]
service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model=model, rank=8).result()
sampler = service.create_sampling_client(base_model=model).result()
for name in names:
    renderer = get_renderer(name, get_tokenizer(model), get_image_processor(model))
    for sizes in ([(96, 64)], [(1, 1), (33, 200)], [(640, 480), (96, 64), (48, 48)]):
        parts = [{"type": "image", "image": Image.new("RGB", size, "red")} for size in sizes]
        asked = {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
        said = {"role": "assistant", "content": [{"type": "text", "text": "It is red."}]}
        model_input, weights = renderer.build_supervised_example([asked, said])
        datum = datum_from_model_input_weights(model_input, weights)
        (output,) = trainer.forward_backward([datum], "cross_entropy").result().loss_fn_outputs
        trained, taken = output["logprobs"].to_numpy(), np.array(datum.loss_fn_inputs["weights"].data) > 0
        assert len(trained) == len(taken) == datum.model_input.length == model_input.length - 1, (name, sizes)
        scores = sampler.compute_logprobs(model_input).result()
        assert len(scores) == model_input.length, (name, sizes)
        apart = np.abs(np.array(scores[1:])[taken] - trained[taken])
        assert 0 < taken.sum() and apart.mean() < 1e-4, (name, sizes, apart)
"""
RENDERERS = (
    *("qwen3_vl", "qwen3_vl_instruct"),
    *("qwen3_5", "qwen3_5_disable_thinking", "qwen3_5_preserve_thinking"),
    *("qwen3_8_xhigh_reasoning", "qwen3_8_disable_thinking"),
)
"""Of the cookbook's models that see and whose pictures this server takes."""


def test_the_renderers_count_the_positions_of_pictures_as_the_server_does(gallery: Workspace) -> None:
    gallery.script(RENDERED, SEEING_ALIAS, *RENDERERS)
