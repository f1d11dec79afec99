"""New weights for a running vLLM: read or received beside the engine, checked, and put into the model in one step."""
