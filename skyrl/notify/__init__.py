"""Telling other processes that something has changed: sockets on one machine, PostgreSQL between machines."""
