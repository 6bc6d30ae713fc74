"""Checks of a run before it starts, for `jppo.doctor`."""
