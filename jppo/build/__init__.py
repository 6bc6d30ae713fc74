"""Builds the components of a run from its settings. No lower layer reads the settings."""
