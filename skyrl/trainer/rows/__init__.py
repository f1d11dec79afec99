"""Sequences as rows: which rows sequences have in common, and how they lie one after the other in a micro-batch."""
