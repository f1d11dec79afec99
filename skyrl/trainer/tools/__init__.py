"""Processes that the command line starts to make files of models: `python -m skyrl.trainer.tools.<name>`."""
