"""What outlives a process: the database, the checkpoint store, and the notices that the database has changed.

Knows the rows and files of runs, samples and checkpoints, and nothing of HTTP or of models in memory.
"""
