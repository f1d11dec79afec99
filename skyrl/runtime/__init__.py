"""What a process needs to run, whatever it serves: supervision, a web server's limits, metrics, traces, and the Ray cluster.
Knows nothing of Tinker, models or requests."""
