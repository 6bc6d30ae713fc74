"""Loggers outside the run folder: Weights & Biases, MLflow, SwanLab, ClearML and Trackio."""
