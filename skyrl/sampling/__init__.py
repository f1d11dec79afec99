"""The forwarding path: from a sample request to vLLM's completion and back, without the engine."""
