"""Messages as they travel: JSON and protobuf, tinker:// paths, error categories. Imports nothing else of skyrl."""
