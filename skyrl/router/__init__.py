"""`skyrl router`: one address in front of many inference servers, with policies, health probes and middleware.

It knows HTTP, not models: only policies and middleware read a body, and only middleware changes one.
"""
