"""Graders: what a response is worth."""
