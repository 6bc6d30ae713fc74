import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jppo.config import UserError
from jppo.rollout import weights

TENSORS = {"w": np.arange(4, dtype=np.float32)}


@pytest.fixture
def buffers():
    made = weights.Buffers("")
    yield made
    made.close()


def test_files_are_written_in_turn(buffers):
    paths = [buffers.write(TENSORS.items())[0] for _ in range(4)]
    assert paths[0] != paths[1] and paths[:2] == paths[2:]


def test_another_process_reads_the_nameless_file(buffers):
    before = set(os.listdir("/dev/shm"))
    path, _ = buffers.write(TENSORS.items())
    read = subprocess.run([sys.executable, "-c", f"print(open({path!r}, 'rb').read()[:16].hex())"], capture_output=True)
    assert bytes.fromhex(read.stdout.decode()) == TENSORS["w"].tobytes()
    assert set(os.listdir("/dev/shm")) == before


def test_a_renewed_file_is_not_the_one_that_may_still_be_read(buffers):
    path, _ = buffers.write(TENSORS.items())
    with open(path, "rb") as reader:
        buffers.renew()
        for shift in (1, 2):
            buffers.write([("w", TENSORS["w"] + shift)])
        assert reader.read()[:16] == TENSORS["w"].tobytes()


def test_files_in_a_folder_have_names_and_go(tmp_path):
    buffers = weights.Buffers(str(tmp_path))
    path, _ = buffers.write(TENSORS.items())
    assert pathlib.Path(path).parent.parent == tmp_path
    buffers.renew()
    buffers.write(TENSORS.items())
    buffers.close()
    buffers.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none_is_the_users_fault(tmp_path):
    with pytest.raises(UserError, match="publish_dir"):
        weights.Buffers(str(tmp_path / "none"))


def test_a_full_disk_is_the_users_fault():
    buffers = weights.Buffers("")
    for fd, _ in buffers._files:
        os.close(fd)
    buffers._files = [(os.open("/dev/full", os.O_WRONLY), ""), (os.open("/dev/full", os.O_WRONLY), "")]
    with pytest.raises(UserError, match="room for them twice"):
        buffers.write(TENSORS.items())
    buffers.close()


def test_buffers_for_adapters_have_a_folder():
    buffers = weights.Buffers("", named=True)
    assert buffers.folder is not None and os.path.isdir(buffers.folder)
    buffers.close()
    assert not os.path.exists(buffers.folder)
