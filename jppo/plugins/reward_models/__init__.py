"""Reward models, `reward.model`, by JAX here, or by transformers or vLLM elsewhere. Start with `make.py`."""
