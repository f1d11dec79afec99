"""`skyrl demo`: two tenants side by side through the unmodified SDK, and what that gained is measured."""
