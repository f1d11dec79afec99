"""The placer: the process that places a server's vLLMs on the nodes of a Ray cluster."""
