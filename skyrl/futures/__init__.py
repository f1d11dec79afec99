"""Life of a request: its id, its durable row, who waits for it, how the engine hears of it, when it is forgotten."""
