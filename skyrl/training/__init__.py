"""What changes weights: the engine loop, which takes commands in order, and the backends that compute them. Knows nothing of
HTTP."""
