"""Described machines: ahead-of-time compilation for absent GPUs and TPUs, and accounts of the programs."""
