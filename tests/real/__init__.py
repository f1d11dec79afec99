"""A released model, SmolLM2-135M-Instruct, on real servers: `make test-real`. Fetched from the package index."""
