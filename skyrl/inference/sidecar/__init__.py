"""`skyrl sidecar`: SGLang's `/generate` and control routes in front of one vLLM. Everything else is vLLM's."""
