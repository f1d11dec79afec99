"""Tables, connections, migrations and the group-commit writer. Knows SQL; knows nothing of HTTP, torch or vLLM."""
