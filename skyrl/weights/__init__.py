"""New weights for inference servers: one protocol for whole checkpoints, shared memory and groups of processes.

A trainer of your own uses `skyrl.weights.protocol.push` with `CheckpointOnDisk` or `TrainerGroup`. Public: trainers
import it. Knows tensors, files and the routes that take them, and nothing of the server.
"""
