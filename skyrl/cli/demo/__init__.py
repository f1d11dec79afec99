"""`skyrl demo`: two tenants train at the same time through the unmodified SDK; the gain in time is measured."""
