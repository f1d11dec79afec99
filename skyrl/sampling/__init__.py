"""Sampling: from a sample request to vLLM's answer, with quotas, order and retries. API and engine use it.

Knows jobs, tenants, inference servers and their failures. Does not know HTTP routes, chats, or training.
"""
