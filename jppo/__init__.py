"""jppo: PPO for language models in JAX, with rollouts by an external vLLM. See docs/architecture.md."""

__version__ = "0.1.0"
