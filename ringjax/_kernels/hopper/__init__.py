"""Kernels for Hopper GPUs."""
