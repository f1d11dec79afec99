"""A client for agent sessions: run an unmodified agent on the server, and get its trajectory as training data."""
