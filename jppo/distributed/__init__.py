"""Several hosts as one run: how they find one another, and what they exchange."""
