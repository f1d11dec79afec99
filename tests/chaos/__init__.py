"""`make chaos`: tenants who differ work on a real server while a seeded script kills and stalls its processes."""
