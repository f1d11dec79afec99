"""LoRA adapters: their buffers and optimizer, the linear layers that serve many of them at once, and their files."""
