"""Agent sessions: exact trajectories of agents that speak any of the server's dialects."""
