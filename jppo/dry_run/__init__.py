"""Dry runs: derived sizes, memory and forecast of a run on this or a described machine."""
