"""The engine process: a model's commands in their order, models in turn, and nothing else between a client and its step."""
