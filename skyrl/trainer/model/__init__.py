"""The base model: loads it, prepares it for packed rows and adapters, and decides what a micro-batch may keep."""
