"""What outlives a process: the database, the requests in it, the checkpoint store, and notices of what has changed.

Knows rows, files and who waits for them. Knows neither HTTP nor models in memory.
"""
