"""What runs on the node of a replica, inside vLLM's API server: adapters come from the checkpoint store to the node.

Imports neither torch nor vLLM nor the database.
"""
