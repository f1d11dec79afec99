"""The SDK matrix: the same checks through every released SDK that the server promises to serve."""
