"""The `skyrl` commands, and the processes that they start: a server, a rollout plane, a demo.

Knows every part by its command line and its options, and no trainer. `main` starts fast: each command imports heavy
modules only when it runs.
"""
