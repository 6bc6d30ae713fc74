"""Rewards: rules, functions, judges and reward models that score responses."""
