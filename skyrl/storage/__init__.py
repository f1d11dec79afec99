"""What outlives a process: the database, the requests in it, the checkpoint store, and notices of what has changed."""
