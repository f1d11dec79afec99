"""The cookbook's recipes of supervised training and of preferences on the real server: rolling checkpoints, a run that
was killed and resumed, a downloaded and merged checkpoint, and DPO with a custom loss."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import IM_END, chat_prompt
from skyrl.cli.demo.server import DemoServer

from ..conftest import ALIAS, ClientFactory, greedy
from . import tasks
from .agreement import assert_agree
from .conftest import CHATS, Stored, assert_final_is_kept
from .workspace import KEY, Run, Workspace, kill_after_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]


def test_supervised_training_lowers_the_loss(rolling: Run) -> None:
    loss = rolling.column("train_mean_nll")
    assert loss[-1] < 0.6 * loss[0]
    rolling.shows("the loss falls; a killed run resumes at its last checkpoint", data="rows with `messages`", loss=loss)


def test_rolling_checkpoints_are_deleted_and_the_others_are_kept(rolling: Run, stored: Stored) -> None:
    assert [row["name"] for row in rolling.checkpoints] == ["000001", "000002", "000003", "final"]
    kept = {row[kind] for row in rolling.checkpoints if "rolling" not in row for kind in ("state_path", "sampler_path")}
    assert stored.paths(rolling) == kept
    assert_final_is_kept(rolling, stored)


def test_a_killed_run_resumes_at_its_last_checkpoint(workspace: Workspace, stored: Stored) -> None:
    run, process = workspace.start("chat_sl.train", "killed", *CHATS, "save_every=3")
    kill_after_checkpoint(run, process)
    saved = run.checkpoints[-1]
    (first,) = run.column("train_mean_nll")[:1]
    steps = saved["batch"] + 2
    options = ("save_every=3", f"max_steps={steps}", "behavior_if_log_dir_exists=resume")
    workspace.run("chat_sl.train", "killed", *CHATS, *options)
    assert run.column("step") == list(range(steps))
    # A run that started anew would show the first loss and the optimizer's first step.
    assert max(run.column("train_mean_nll")[saved["batch"] :]) < 0.8 * first
    assert run.column("optimizer_step")[saved["batch"]] > saved["batch"]
    assert run.training_run not in saved["state_path"]
    assert_final_is_kept(run, stored)


DATA = "`HuggingFaceH4/no_robots`: rows with `messages`"


@pytest.fixture(scope="module")
def conversations(workspace: Workspace) -> Workspace:
    """With 640 conversations: five batches of `sl_basic`, which has no option for their size."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": tasks.question(animal)},
                {"role": "assistant", "content": tasks.statement(animal)},
            ]
        }
        for animal in tasks.ANIMALS
    ]
    for split, copies in (("train", 80), ("test", 1)):
        tasks.write_rows(workspace.root / "HuggingFaceH4" / "no_robots" / f"{split}.jsonl", rows * copies)
    return workspace


def check(run: Run, url: str, tokenizer: PreTrainedTokenizerBase, stored: Stored) -> None:
    loss = run.column("train_mean_nll")
    assert loss[-1] < 0.5 * loss[0]
    text = chat_prompt(tasks.question("fox")) + tasks.statement("fox")
    apart = assert_agree(run, url, tokenizer.encode(text))
    assert_final_is_kept(run, stored)
    run.shows("the loss falls; the final sampler and trainer agree", data=DATA, loss=loss, difference=[apart])


def test_sl_basic_lowers_the_loss(
    conversations: Workspace, server: DemoServer, tokenizer: PreTrainedTokenizerBase, stored: Stored
) -> None:
    run = conversations.run("sl_basic", "sl-basic", "learning_rate=1e-2", "eval_every=0")
    assert len(run.column("train_mean_nll")) == 5
    check(run, server.url, tokenizer, stored)


def test_sl_loop_lowers_the_loss(
    conversations: Workspace, server: DemoServer, tokenizer: PreTrainedTokenizerBase, stored: Stored
) -> None:
    options = ("batch_size=8", "max_length=256", "learning_rate=1e-2", "max_steps=8")
    check(conversations.run("sl_loop", "sl-loop", *options), server.url, tokenizer, stored)


PREFERENCES = "`Anthropic/hh-rlhf`: rows with `chosen` and `rejected`"


def test_dpo_starts_at_the_reference_and_moves_away(workspace: Workspace, stored: Stored) -> None:
    options = ("batch_size=4", "max_length=256", "learning_rate=1e-3", "max_steps=3")
    run = workspace.run("preference.dpo.train", "dpo", *options)
    loss = run.column("dpo_loss")
    # The policy is still the reference: -log sigmoid(0).
    assert loss[0] == pytest.approx(math.log(2), abs=0.001)
    assert max(loss[1:]) < 0.6
    assert min(run.column("margin")[1:]) > 0.2
    assert_final_is_kept(run, stored)
    run.shows("the loss is ln 2 at first, then falls", data=PREFERENCES, loss=loss)


def test_sampler_and_trainer_agree_after_a_step_that_moved_the_policy(workspace: Workspace, stored: Stored) -> None:
    options = ("batch_size=2", "group_size=4", "max_tokens=16", "learning_rate=1e-3", "max_steps=3")
    run = workspace.run("preference.shorter.train", "shorter", *options)
    assert run.column("kl_pre_post_v2")[0] > 0.01
    # Half the mean squared difference between the logprobs of sampler and trainer; rounding alone gives 1e-12.
    assert all(apart < 1e-8 for apart in run.column("optim/kl_sample_train_v2"))
    assert all(map(math.isfinite, run.column("env/all/reward/total")))
    assert run.column("optimizer_step") == [1, 2, 3]
    assert_final_is_kept(run, stored)
    run.shows(
        "sampler and trainer agree after steps that move the policy", divergence=run.column("optim/kl_sample_train_v1")
    )


def test_the_student_names_a_language_without_the_teachers_prompt(
    workspace: Workspace, server: DemoServer, tokenizer: PreTrainedTokenizerBase, stored: Stored
) -> None:
    """The data is what the recipe's `create_data` writes: sentences, and the labels that a teacher gave them."""
    rows = [
        {"messages": [{"role": "user", "content": sentence}, {"role": "assistant", "content": label}]}
        for label, sentences in tasks.SENTENCES.items()
        for sentence in sentences
    ]
    tasks.write_rows(workspace.root / "languages.jsonl", rows * 10)
    options = ("file_path=languages.jsonl", "batch_size=8", "learning_rate=1e-2", "num_epochs=2", "eval_every=0")
    run = workspace.run("prompt_distillation.train", "prompt-distillation", *options)
    loss = run.column("train_mean_nll")
    assert loss[-1] < 0.2 * loss[0]
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as client:
        student = client.create_sampling_client(model_path=run.checkpoints[-1]["sampler_path"]).result()
        for label, sentences in tasks.SENTENCES.items():
            answer = greedy(student, tokenizer.encode(chat_prompt(sentences[0])))
            wanted = tokenizer.encode(f"{label}{IM_END}")
            assert answer[: len(wanted)] == wanted
    text = chat_prompt(tasks.SENTENCES["el"][0]) + "el"
    apart = assert_agree(run, server.url, tokenizer.encode(text))
    assert_final_is_kept(run, stored)
    run.shows(
        "the model gives the teacher's answer without its prompt; the final sampler and trainer agree",
        data="rows with `messages`, as `prompt_distillation.create_data` writes them",
        loss=loss,
        difference=[apart],
    )


DOWNLOAD = """
import sys
from tinker_cookbook import weights

checkpoint, model, out = sys.argv[1:]
adapter = weights.download(tinker_path=checkpoint, output_dir=f"{out}/adapter")
weights.build_hf_model(
    base_model=model, adapter_path=adapter, output_path=f"{out}/merged", merge_strategy="full", dtype="float32"
)
weights.build_lora_adapter(base_model=model, adapter_path=adapter, output_path=f"{out}/peft")
"""


@pytest.fixture(scope="module")
def downloaded(workspace: Workspace, rolling: Run) -> Path:
    """The final checkpoint, downloaded, merged (`merged`) and converted (`peft`) by the cookbook."""
    out = workspace.root / "downloaded"
    workspace.script(DOWNLOAD, rolling.checkpoints[-1]["state_path"], ALIAS, str(out))
    return out


def test_the_files_arrive_decrypted_and_the_export_is_deleted(downloaded: Path, stored: Stored) -> None:
    names = {file.name for file in (downloaded / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert not [name for name in names if name.endswith(".age")]
    config = json.loads((downloaded / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (32, 32)
    # The cookbook's conversion has no names to change: the names are already those of PEFT and vLLM.
    converted = load_file(downloaded / "peft" / "adapter_model.safetensors")
    assert load_file(downloaded / "adapter" / "adapter_model.safetensors").keys() == converted.keys()
    assert not [kept for kept in stored.everything() if "/external_weights/" in kept.tinker_path]


def test_the_merged_model_gives_the_servers_logprobs(
    downloaded: Path, rolling: Run, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokens = tokenizer.encode(chat_prompt("Where is the fox?") + "The old fox watches the mill.")
    sampler = connect(KEY).create_sampling_client(model_path=rolling.checkpoints[-1]["sampler_path"]).result()
    served = torch.tensor(sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:])
    own = logprobs(downloaded / "merged", tokens)
    assert torch.allclose(own, served, atol=1e-3)
    assert not torch.allclose(logprobs(downloaded.parent / ALIAS, tokens), served, atol=1.0)


def logprobs(model: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probability of each token but the first, as stock transformers computes it in float32."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        scores = network(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
