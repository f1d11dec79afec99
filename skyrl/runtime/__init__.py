"""What a process needs to run, whatever it serves: supervision, metrics, traces, the Ray cluster, and the worker
process that opens pictures.

Knows names, numbers, sockets and files. Answers no requests and runs no models.
"""
