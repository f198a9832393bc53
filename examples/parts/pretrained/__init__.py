"""Pretrained language models: configuration, layers, weights, and low-rank adapters."""
