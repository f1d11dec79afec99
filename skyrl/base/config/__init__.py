"""The server's configuration: its keys, how it is loaded, and what becomes of SkyRL's keys."""
