"""What is computed, whoever computes it: patterns, dropout, sinks and the reference, with the checks of arguments."""
