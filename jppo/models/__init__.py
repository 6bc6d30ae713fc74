"""The models: one decoder, one table of its parameters, and the way to and from Hugging Face files."""
