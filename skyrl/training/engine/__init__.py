"""The engine process: runs each model's commands in order, and models in turn."""
