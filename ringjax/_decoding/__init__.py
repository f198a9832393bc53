"""Caches, and the calls that continue what is in them."""
