"""Processes of a server: how they are started and supervised, their ports and log lines, and why a start failed."""
