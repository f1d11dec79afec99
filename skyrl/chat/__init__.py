"""Chats and completions: OpenAI's requests, the other dialects of agents, and sessions that keep what agents do.

Knows messages, chat templates and the forwarding client. Does not know HTTP routes or training.
"""
