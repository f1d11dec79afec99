"""What outlives a process: the database, the notices between processes, and the checkpoint store. Knows neither HTTP nor
models."""
