"""The mesh of a call: which one it is, and how arrays lie on it."""
