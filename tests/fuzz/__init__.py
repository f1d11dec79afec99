"""Input that nobody would send on purpose, against a real server: nothing breaks it, and no answer tells of others."""
