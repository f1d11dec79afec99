"""New weights for inference servers: one protocol for adapter files, whole checkpoints and groups of processes.

A trainer of your own uses `skyrl.weights.push` with `CheckpointOnDisk` or `TrainerGroup`; the engine of `skyrl serve`
publishes adapters by `AdapterFiles`. Public: trainers import it. Knows tensors, files and the routes that take them,
and nothing of the server.
"""
