"""Passes: what runs of them, in which micro-batches, and what is summed over these."""
