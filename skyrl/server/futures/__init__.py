"""The requests of an API process: recording them, waiting for their outcomes, settling them."""
