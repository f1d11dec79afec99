"""A self-hosted server for the Tinker API: many tenants train LoRA adapters, and sampling never waits for training."""

__version__ = "0.3.0"
