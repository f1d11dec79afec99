"""`skyrl router`: one address in front of many inference servers, with policies, health probes and middleware.

Knows HTTP, not models: only policies and middleware read a body, and only middleware changes one. Knows nothing of the
server; the paths of its middleware are public.
"""
