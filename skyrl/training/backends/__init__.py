"""Training backends: `base` is the protocol, every other module or package is one backend."""
