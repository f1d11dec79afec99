"""A model of a cluster: API processes on PostgreSQL, a router, replicas and clients, as discrete events.

`events` is the clock, `cores` what processes share, `parts` what each process does with a sample, `services`
the CPU time that each step takes, `scenarios` the clusters. `calibrate` measures the times of `services`, `real` runs
the largest real cluster that fits on one machine, and `__main__` compares the model with it and answers the questions
about a large one.
"""
