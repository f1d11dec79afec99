"""`skyrl demo`: two tenants train and sample side by side through the unmodified SDK, and what that gained is measured."""
