"""What changes weights: the engine, which runs each model's commands in order, and the backends that compute them.

Knows the command log, models and optimizers, and nothing of HTTP routes. Of `skyrl.server` it uses only the forwarding
client, which samples for colocated modes, and the limits of quotas.
"""
