"""Messages between clients and server: JSON, protobuf, tinker:// paths and errors. Imports nothing else of skyrl."""
