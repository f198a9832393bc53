"""What a call would take of a machine, counted before it runs."""
