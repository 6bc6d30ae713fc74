"""Files, loggers and console output of a run; checkpoints; several hosts."""
