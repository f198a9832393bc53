"""What every implementation computes: patterns, dropout, sinks and the reference, with the checks of arguments."""
