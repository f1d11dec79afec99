"""The forwarding path: from a sample request to the completion of vLLM and back, without the engine."""
