"""The number of row lengths: by the setting, or by the size of the run."""

import pytest

from examples import arithmetic
from jppo import settings
from jppo.learner import make
from jppo.learner.make import make_mesh
from jppo.models import config_reader


@pytest.mark.parametrize("given,sequences,expected", [(-1, 50 * 6, 1), (-1, 10**7, 4), (7, 1, 7)])
def test_a_small_run_has_one_row_length(config, given, sequences, expected):
    config.data.row_lengths = given
    c, cfg = settings.typed(config), config_reader.parse_config(arithmetic.MODEL, path="here")
    assert make.row_length_count(c, make_mesh(c), cfg, sequences) == expected
