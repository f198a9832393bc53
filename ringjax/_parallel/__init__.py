"""What the devices do: rows travel and meet, results are added, and the whole is differentiated."""
