"""New weights for inference servers: one protocol for adapter files, whole checkpoints and groups of processes.

A trainer of your own uses `skyrl.weights.push` with `CheckpointOnDisk` or `TrainerGroup`; the engine of `skyrl serve`
publishes adapters by `AdapterFiles`.
"""
