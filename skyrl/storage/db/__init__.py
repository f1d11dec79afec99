"""The database: tables, statements, connections, migrations and the group-commit writer.

All SQL of skyrl is here. Functions take a `Connection` or a `Database`, and return rows as frozen dataclasses. Knows
nothing of HTTP, torch or vLLM.
"""
