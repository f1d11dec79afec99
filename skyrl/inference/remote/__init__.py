"""What runs on the node of a replica: adapters and versions of the full weights come from the checkpoint store to the
node, inside vLLM's API server or inside the sidecar.

Imports neither torch nor vLLM nor the database.
"""
