"""Where a request stands: that it runs, or what it waits for, as one sentence that is the same everywhere."""
