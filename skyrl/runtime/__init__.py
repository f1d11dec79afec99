"""What a process needs to run, whatever it serves: supervision, HTTP listening, metrics, traces, the Ray cluster.

Knows names, numbers and sockets, and neither models nor requests.
"""
