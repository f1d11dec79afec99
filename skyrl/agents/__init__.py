"""The client for agent sessions: runs unmodified agents on the server, and gets their trajectories as training data.

Public: researchers import it. Knows the server's HTTP API, and no other door.
"""

from skyrl.agents.commands import Command, Finished
from skyrl.agents.errors import AgentsError, BadAnswer, CommandFailed, RequestRefused, ServerUnavailable
from skyrl.agents.runs import Agent, Progress, ProgressLine, run
from skyrl.agents.session import AgentServer, Limits, Session, SessionOptions
from skyrl.agents.trajectories import Group, Row, Trajectory, advantages, collect

__all__ = [
    "Agent",
    "AgentServer",
    "AgentsError",
    "BadAnswer",
    "Command",
    "CommandFailed",
    "Finished",
    "Group",
    "Limits",
    "Progress",
    "ProgressLine",
    "RequestRefused",
    "Row",
    "ServerUnavailable",
    "Session",
    "SessionOptions",
    "Trajectory",
    "advantages",
    "collect",
    "run",
]
