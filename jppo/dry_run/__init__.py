"""Dry runs: what a run would be, its memory, and its forecast on this or a described machine."""
