"""Ray: the connection to a cluster, the cluster of one machine, what a cluster has free, and servers on its nodes."""
