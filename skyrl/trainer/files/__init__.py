"""A model's files: config.json, safetensors, and which tensors of files make which parameter."""
