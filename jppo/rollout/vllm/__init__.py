"""Rollouts by vLLM, and the transfer of weights to it."""
