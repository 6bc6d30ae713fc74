"""Rollout engines: sampling, and publishing weights to servers."""
