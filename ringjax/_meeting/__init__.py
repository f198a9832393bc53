"""Rows of queries meet rows of keys: the slots in which they lie, their mask, and the softmax."""
