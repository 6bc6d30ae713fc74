"""A command line of verl's in jppo's words: its names, its values, its shell scripts."""
