"""The torch training backend: one frozen base model, many LoRA adapters, and micro-batches of several adapters."""
