"""The files of published weights and adapters; test_fleet.py has the order of a publish, test_carriers.py the rest."""

import errno
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jppo.errors import UserError
from jppo.rollout.vllm import client, layout, publish
from jppo.rollout.vllm.publish import Buffers, FilePublisher

TENSORS = {f"w{i}": np.arange(i, i + 500, dtype=np.float32) for i in range(5)}
SHAPES = {name: tensor.shape for name, tensor in TENSORS.items()}


@pytest.fixture
def buffers():
    made = Buffers("")
    yield made
    made.close()


def in_another_process(path):
    read = subprocess.run([sys.executable, "-c", f"print(open({path!r}, 'rb').read().hex())"], capture_output=True)
    return bytes.fromhex(read.stdout.decode())


def test_files_are_written_in_turn_and_the_second_is_not_there_before(buffers):
    memfds = [len(os.listdir("/proc/self/fd"))]
    paths = []
    for _ in range(4):
        paths.append(buffers.write(TENSORS.items()).path)
        memfds.append(len(os.listdir("/proc/self/fd")))
    assert paths[0] != paths[1] and paths[:2] == paths[2:]
    assert [n - memfds[0] for n in memfds] == [0, 1, 2, 2, 2]


def test_a_renewed_file_is_not_the_one_that_may_still_be_read(buffers):
    kept = buffers.write(TENSORS.items())
    with open(buffers.write([("w0", TENSORS["w0"] + 1)]).path, "rb") as reader:
        buffers.renew()
        buffers.write([("w0", TENSORS["w0"] + 2)])
        layout.map_checked(kept.path, kept.entries, SHAPES)  # the last good one is still there
        buffers.write([("w0", TENSORS["w0"] + 3)])
        assert reader.read()[:2000] == (TENSORS["w0"] + 1).tobytes()


def test_another_process_reads_the_nameless_file(buffers):
    before = set(os.listdir("/dev/shm"))
    assert in_another_process(buffers.write(TENSORS.items()).path)[:2000] == TENSORS["w0"].tobytes()
    assert set(os.listdir("/dev/shm")) == before


def test_files_in_a_folder_have_names_and_go(tmp_path):
    buffers = Buffers(str(tmp_path))
    paths = [pathlib.Path(buffers.write(TENSORS.items()).path) for _ in range(2)]
    assert all(path.parent.parent == tmp_path for path in paths)
    buffers.renew()
    assert [path.exists() for path in paths] == [True, False]
    buffers.close()
    buffers.close()
    assert list(tmp_path.iterdir()) == []


def test_files_that_were_removed_are_put_away_without_an_error(tmp_path):
    """A server has refused them; that is what the run reports."""
    buffers = Buffers(str(tmp_path))
    for _ in range(2):
        pathlib.Path(buffers.write(TENSORS.items()).path).unlink()
    buffers.renew()
    buffers.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none_is_the_users_fault(tmp_path):
    with pytest.raises(UserError, match="publish_dir"):
        Buffers(str(tmp_path / "none"))


def test_adapters_have_a_folder_and_the_weights_beside_them_no_name():
    buffers = Buffers("", named=True)
    assert os.path.isdir(buffers.folder)
    assert buffers.write(TENSORS.items()).path.startswith("/proc/") and os.listdir(buffers.folder) == []
    buffers.close()
    assert not os.path.exists(buffers.folder)


@pytest.fixture
def little_room(monkeypatch):
    """Room for 5,000 bytes in a file, and in one named in the list for more."""
    real, roomy = os.pwrite, []

    def pwrite(fd, data, offset):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(tuple(roomy)):
            return real(fd, data, offset)
        room = 5000 - offset
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:room], offset)  # as a disk does, that is full soon

    monkeypatch.setattr(layout.os, "pwrite", pwrite)
    return roomy


@pytest.mark.parametrize("folder", ["", "named"])
def test_where_there_is_no_room_another_folder_takes_all_of_it(little_room, folder, tmp_path, capsys):
    full, spare, publish = (tmp_path / name for name in ("full", "spare", "publish"))
    for path in (full, spare, publish):
        path.mkdir()
    little_room.append(str(spare))
    buffers = Buffers(str(publish) if folder else "", spare=[str(tmp_path / "none"), str(full), str(spare)])
    parcels = []
    for _ in range(4):
        parcels.append(buffers.write(iter(TENSORS.items())))
        layout.map_checked(parcels[-1].path, parcels[-1].entries, SHAPES)
        assert in_another_process(parcels[-1].path)[2048:4048] == TENSORS["w1"].tobytes()
    said = capsys.readouterr().err
    assert said.count("\n") == said.count(f"{spare} is used from now on") == 2  # of each file
    assert [parcel.path for parcel in parcels[:2]] == [parcel.path for parcel in parcels[2:]]
    assert all(list(path.rglob("*")) == [] for path in (full, spare))
    buffers.close()
    assert list(publish.iterdir()) == []


def test_a_full_file_that_ends_before_the_next_tensors_place_is_copied(little_room, tmp_path):
    little_room.append(str(tmp_path))
    tensors = {"w0": np.arange(1249, dtype=np.float32), "w1": np.arange(500, dtype=np.float32)}  # 4,996 bytes
    buffers = Buffers("", spare=[str(tmp_path)])
    parcel = buffers.write(tensors.items())
    layout.map_checked(parcel.path, parcel.entries, {name: tensor.shape for name, tensor in tensors.items()})
    assert pathlib.Path(parcel.path).stat().st_size >= layout.size_of(parcel.entries)
    buffers.close()


def test_no_room_anywhere_is_the_users_fault(little_room, tmp_path):
    buffers = Buffers("", spare=[str(tmp_path)])
    with pytest.raises(UserError, match=r"shared memory: .*No space left.*rollout\.publish_dir"):
        buffers.write(TENSORS.items())
    little_room.append("/memfd")  # room again
    layout.map_checked((parcel := buffers.write(TENSORS.items())).path, parcel.entries, SHAPES)
    buffers.close()


def test_another_fault_than_no_room_is_not_answered_by_another_folder(monkeypatch, tmp_path, capsys):
    def broken(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(layout.os, "pwrite", broken)
    buffers = Buffers("", spare=[str(tmp_path)])
    with pytest.raises(UserError, match="broken"):
        buffers.write(TENSORS.items())
    buffers.close()
    assert capsys.readouterr().err == ""


def test_many_tensors_are_never_all_held(buffers, monkeypatch):
    monkeypatch.setattr(publish, "UNDER_WAY", 3000)
    alive, most = set(), 0

    class Tensor(np.ndarray):
        def __del__(self):
            alive.discard(id(self))

    def tensors():
        nonlocal most
        for i in range(50):
            tensor = np.full(250, i, np.float32).view(Tensor)
            alive.add(id(tensor))
            most = max(most, len(alive))
            yield f"w{i}", tensor
            del tensor

    parcel = buffers.write(tensors())
    layout.map_checked(parcel.path, parcel.entries, {f"w{i}": (250,) for i in range(50)})
    assert 2 <= most <= 6  # 3 of 1,000 bytes, the one that was just made, and what the loops hold


def save(path):
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")


def adapters_in(buffers):
    return sorted(path.name for path in pathlib.Path(buffers.folder).glob("adapter-*"))


def test_the_last_two_adapters_are_kept_until_a_whole_policy_comes(tmp_path):
    buffers = Buffers(str(tmp_path), named=True)
    publisher = FilePublisher(buffers)
    publisher.whole(TENSORS.items(), 1)
    made = [publisher.adapter(save, version) for version in (1, 2, 3)]
    assert [one.before for one in made] == [None, made[0].model, made[1].model]
    assert len({one.model for one in made}) == 3 and not any(one.whole for one in made)
    assert adapters_in(buffers) == sorted(one.model for one in made[1:])
    whole = publisher.whole(TENSORS.items(), 4)
    assert whole.whole and whole.model is None and adapters_in(buffers) == []


def test_adapters_that_cannot_be_written_are_an_error_of_the_folder(tmp_path):
    def full(path):
        raise OSError("No space left on device")

    with pytest.raises(UserError, match="to a folder with room"):
        FilePublisher(Buffers(str(tmp_path), named=True)).adapter(full, 1)


@pytest.mark.parametrize("rank, named", [(0, False), (1, True)])
def test_only_adapters_need_files_with_names(settings, monkeypatch, rank, named):
    class Made(Exception):
        pass

    def recorded(folder, **options):
        raise Made(folder, options)

    monkeypatch.setattr(client, "Buffers", recorded)
    with pytest.raises(Made) as e:
        client.start_vllm("model", "run", settings=settings(lora_rank=rank, publish_dir="there"), urls=["http://h:1"])
    assert e.value.args == ("there", {"named": named, "spare": []})
