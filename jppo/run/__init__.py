"""An opened PPO run: start, validation, export."""
