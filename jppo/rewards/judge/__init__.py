"""A language model as a judge."""
