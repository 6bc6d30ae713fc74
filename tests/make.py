"""What several tests make: settings as frozen sections."""

import ml_collections

from jppo.settings import table


def typed(config):
    """Settings as sections, unchecked, so that a test may break them; sections stay as they are."""
    return table.sections(config, table.kind_of(config)) if isinstance(config, ml_collections.ConfigDict) else config
