"""The models: a decoder, the table of its parameters, and conversion to and from Hugging Face files."""
