"""Mixtures of experts: their routers, and their layers, which serve many adapters, on one device or over ranks."""
