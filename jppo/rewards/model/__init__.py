"""Reward models: by JAX, by vLLM, or by transformers and torch."""
