"""`make chaos`: two tenants' RL on a real server whose processes are killed and stalled at random."""
