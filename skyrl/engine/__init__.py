"""The engine process: a model's commands in their order, models in turn."""
