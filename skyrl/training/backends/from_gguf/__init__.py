"""A GGUF file as a Hugging Face directory that trainer and vLLM load: the work of `skyrl model from-gguf`.

Knows GGUF's names, llama.cpp's layouts of weights, and transformers' configurations. Knows nothing of adapters or
passes. What it does not know of a file, it refuses: a model that is almost converted computes wrong numbers.
"""
