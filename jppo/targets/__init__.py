"""Described machines: XLA's own compilers for GPUs and TPUs that are not there, and accounts of what they compile."""
