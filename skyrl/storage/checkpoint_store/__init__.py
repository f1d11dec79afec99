"""Where saved files lie: one interface, on a local directory or an object store."""
