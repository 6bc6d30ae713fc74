"""Which optimizers there are, and which settings each reads."""

import ml_collections

from jppo.config.defaults import default
from jppo.config.errors import UserError

OPTIMIZERS = ("adamw", "muon", "adafactor", "lion", "sgd")


def check_optimizers(config: ml_collections.ConfigDict) -> None:
    """UserError where an optimizer is not known, or where it does not read what is set."""
    for section in ("actor", "critic", "optim"):
        if section not in config:
            continue
        name, betas, usual = config[section].optimizer, config[section].betas, default().actor.betas
        if name not in OPTIMIZERS and ".py:" not in name:
            raise UserError(
                f"{section}.optimizer={name!r} is not known; it is one of {', '.join(map(repr, OPTIMIZERS))}, or"
                " 'path.py:name', a function that returns an optax chain"
            )
        if name == "adafactor" and betas != usual:
            raise UserError(
                f"{section}.betas={betas} is not read by {section}.optimizer='adafactor'; leave it at {usual}"
            )
