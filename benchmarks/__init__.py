"""Benchmarks, each named as the claim that it measures: `python -m benchmarks.NAME`."""
