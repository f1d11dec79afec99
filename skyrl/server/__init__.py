"""What clients talk to: the Tinker API, the OpenAI endpoint and the status page, with futures, quotas and forwarding.

Knows requests, tenants and where vLLM answers. Knows no trainer: training is a row in the database that the engine
runs.
"""
