"""The implementations, each of which computes the meetings of rows in its own way."""
