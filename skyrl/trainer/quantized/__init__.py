"""Quantized weights: the formats of releases, and weights that stay quantized while the model trains."""
