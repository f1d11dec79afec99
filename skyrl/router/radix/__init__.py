"""The radix cache: which tokens a text stands for, kept from the samples that went through the router."""

from skyrl.router.radix.middleware import RadixTreeMiddleware

__all__ = ["RadixTreeMiddleware"]
