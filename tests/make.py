"""What several tests make: settings as frozen sections."""

import jax
import ml_collections

from jppo.models import decoder, hf, hf_write
from jppo.settings import table


def typed(config):
    """Settings as sections, unchecked, so that a test may break them; sections stay as they are."""
    return table.sections(config, table.kind_of(config)) if isinstance(config, ml_collections.ConfigDict) else config


def write_weights(directory, seed=5):
    """Writes random weights beside a config.json, drawn by its initializer_range."""
    _, cfg = hf.read_config(str(directory))
    params = decoder.init_params(cfg, jax.random.key(seed), head="lm", param_dtype="float32")
    hf_write.save(directory, params, cfg, source=str(directory), dtype="float32")
