"""`make chaos`: two tenants do RL on a real server while a seeded script kills and stalls its processes."""
