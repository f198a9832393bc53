"""Attention steps: rows, masks, the softmax, and the implementations that compute them."""
