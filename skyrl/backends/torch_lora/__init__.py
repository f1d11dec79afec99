"""The torch training backend: one frozen base model, many LoRA adapters, any mix of them in one micro-batch."""
