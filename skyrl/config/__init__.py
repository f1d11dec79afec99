"""The server's configuration: its keys, where values come from, and keys of SkyRL that mean the same."""
