"""Load formats for inference engines: thin modules over `loading`, each imported by its engine alone."""
