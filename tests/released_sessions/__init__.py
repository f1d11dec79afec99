"""Scripted agent sessions on the chat templates of released models: `python -m tests.released_sessions` prints what
becomes of each turn, and writes what docs/reference/architectures.md tells of the cookbook's models."""
