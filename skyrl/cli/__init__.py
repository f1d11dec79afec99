"""The command line. `main` imports nothing heavy: each command imports what it needs when it runs."""
