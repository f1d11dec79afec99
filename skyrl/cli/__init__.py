"""The command line. `main` starts fast: each command imports heavy modules only when it runs."""
