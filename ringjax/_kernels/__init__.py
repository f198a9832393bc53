"""The implementations, each of which computes the steps of rows in its own way."""
