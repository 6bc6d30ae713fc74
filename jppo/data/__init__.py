"""Prompts: reading, templates, filtering, and a stream that can be resumed."""
