"""verl's settings in jppo: its names, scripts and values. Read `translate.py` first."""
