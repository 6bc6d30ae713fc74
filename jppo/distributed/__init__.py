"""Several hosts as one run: joining, gathering, and ending together. Read `hosts.py` first."""
