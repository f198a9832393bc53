"""Tools that report what calls cost: tables, pictures, compiled programs, and the command line."""
