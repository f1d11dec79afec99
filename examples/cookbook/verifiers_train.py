"""`tinker_cookbook.recipes.verifiers_rl.train` of the cookbook 0.6.1, which does not start by itself.

    export PYTHONPATH=examples/cookbook
    python -m verifiers_train vf_env_id=colours-env

The recipe puts a function of its own in place of the cookbook's `do_group_rollout`. The cookbook 0.6.1 calls it with an
argument, `termination`, that the recipe's function does not take: each run ends in a TypeError before its first step.
This program leaves the argument out, which is None in this recipe, and runs the recipe as it is.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from typing import Any

import chz
from tinker_cookbook.recipes.verifiers_rl.train import CLIConfig, cli_main
from tinker_cookbook.rl import rollouts, train

_train = train.main


async def main(config: train.Config) -> None:
    """The cookbook's training loop, which the recipe calls once its function is in place."""
    recipes_own = rollouts.do_group_rollout

    async def do_group_rollout(*args: Any, termination: None = None, **kwargs: Any) -> Any:
        return await recipes_own(*args, **kwargs)

    rollouts.do_group_rollout = do_group_rollout
    await _train(config)


if __name__ == "__main__":
    train.main = main
    asyncio.run(cli_main(chz.entrypoint(CLIConfig), None))
