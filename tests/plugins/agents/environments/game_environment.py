"""An environment for `verifiers` with an episode of its own."""

from products_environment import Game

__all__ = ["Game"]
