"""The operations between the matrix products of a decoder layer: each in plain torch, and as one kernel on a GPU."""
