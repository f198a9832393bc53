"""Caches, and attention that continues the sequences in them."""
