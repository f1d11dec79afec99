"""Losses that clients have traced: computed by an interpreter that has a list of operations, and nothing else."""
