"""What the devices do: they exchange rows, compute attention steps, add branches, and differentiate the whole."""
