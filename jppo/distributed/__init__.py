"""Several hosts as one run: discovery and exchange of data."""
