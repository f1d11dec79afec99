"""A conversation as the inference server's renderer writes it, and which tokens continue an earlier turn."""
