"""The command line, one file a verb. Importing it imports no torch: ``--help`` answers at once."""
