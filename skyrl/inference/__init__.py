"""vLLM servers that skyrl manages: their command line, placement, watchdog, adapters and sleep."""
