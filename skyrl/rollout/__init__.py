"""The inference plane of an RL framework: `skyrl rollout`, which starts one, and the client that samples from it."""
