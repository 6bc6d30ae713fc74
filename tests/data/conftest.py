import pytest

from examples import arithmetic
from jppo.data.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def character_model(tmp_path_factory):
    """A directory with the quickstart's config and character tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    arithmetic.write_model(directory)
    return directory


@pytest.fixture
def characters(character_model):
    """The quickstart's tokenizer, fresh: <pad> 0, <eos> 1, digits from 2, + 12, = 13."""
    return load_tokenizer(str(character_model))
