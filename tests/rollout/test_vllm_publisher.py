"""What vLLM servers are given; the order of it is in test_fleet.py, the files in test_buffers.py."""

import pathlib

import numpy as np
import pytest

from jppo.rollout.vllm.publish import Buffers, Publisher
from jppo.settings import UserError

TENSORS = {"w": np.arange(4, dtype=np.float32)}


@pytest.fixture
def buffers(tmp_path):
    made = Buffers(str(tmp_path), named=True)
    yield made
    made.close()


def save(path):
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")


def adapters_in(buffers):
    return sorted(path.name for path in pathlib.Path(buffers.folder).glob("adapter-*"))


def test_the_last_two_adapters_are_kept_until_a_whole_policy_comes(buffers):
    publisher = Publisher(buffers)
    publisher.whole(TENSORS.items(), 1)
    made = [publisher.adapter(save, version) for version in (1, 2, 3)]
    assert [one.before for one in made] == [None, made[0].model, made[1].model]
    assert len({one.model for one in made}) == 3 and not any(one.whole for one in made)
    assert adapters_in(buffers) == sorted(one.model for one in made[1:])
    whole = publisher.whole(TENSORS.items(), 4)
    assert whole.whole and whole.model is None and adapters_in(buffers) == []


def test_adapters_that_cannot_be_written_are_an_error_of_the_folder(buffers):
    def full(path):
        raise OSError("No space left on device")

    with pytest.raises(UserError, match="to a folder with room"):
        Publisher(buffers).adapter(full, 1)
