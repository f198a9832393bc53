"""Says what calls take: tables, pictures, what compilers make of them, and the command line."""
