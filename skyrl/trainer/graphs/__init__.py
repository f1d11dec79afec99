"""CUDA graphs of functions over rows: one host call starts what is hundreds of operations otherwise."""
