"""The placement process, which places a server's vLLMs on the nodes of a Ray cluster."""
