import errno
import os

import pytest

from jppo.runlog.durable_files import Appender, cut_lines, read_lines


@pytest.fixture
def disk(monkeypatch):
    """A disk with so many bytes left; the write that does not fit is cut, the next one fails."""

    class Disk:
        left = 10**9

    write = os.pwrite

    def pwrite(fd, data, at):
        if Disk.left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(fd, data[: Disk.left], at)
        Disk.left -= done
        return done

    monkeypatch.setattr(os, "pwrite", pwrite)
    return Disk


def test_a_full_disk_loses_nothing_and_leaves_no_half(tmp_path, disk):
    path = tmp_path / "a"
    file = Appender(path)
    file.append(b"one\n")
    disk.left = 2
    for record in (b"two\n", b"three\n"):
        with pytest.raises(OSError, match="No space"):
            file.append(record)
        assert path.read_bytes() == b"one\n"
    assert len(file._waiting) == 2
    disk.left = 5
    with pytest.raises(OSError):
        file.append(b"four\n")
    assert path.read_bytes() == b"one\ntwo\n"
    disk.left = 100
    file.append(b"five\n")
    assert path.read_bytes() == b"one\ntwo\nthree\nfour\nfive\n" and not file._waiting
    file.close()


def test_closing_is_the_last_chance(tmp_path, disk):
    for room in (0, 9):
        disk.left = 0
        file = Appender(tmp_path / str(room))
        with pytest.raises(OSError):
            file.append(b"one\n")
        disk.left = room
        if room:
            file.close()
            assert (tmp_path / "9").read_bytes() == b"one\n"
        else:
            with pytest.raises(OSError):
                file.close()


def test_it_goes_on_at_the_end(tmp_path):
    for record in (b"one\n", b"two\n"):
        file = Appender(tmp_path / "a")
        file.append(record)
        file.close()
    assert (tmp_path / "a").read_bytes() == b"one\ntwo\n"


def test_lines_are_cut_in_place(tmp_path):
    path = tmp_path / "a"
    assert cut_lines(path, lambda row: True) == [] and read_lines(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    assert read_lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert cut_lines(path, lambda row: row["step"] < 3) == [{"step": 1}, {"step": 2}]
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert cut_lines(path, lambda row: False) == [] and path.read_text() == ""


TAILS = [b"\0" * 300, b"\0\n\0\n", b'{"step": 3, "x"', b'{"step": 3}', b"[3]\n", b'{"stop": 3}\n{"step": 4}\n']
TAILS += [b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"\n", b'{"step": "3"}\n', b"{}\n"]


@pytest.mark.parametrize("tail", TAILS)
def test_what_cannot_be_read_is_the_end_of_the_file(tmp_path, capsys, tail):
    """As after a power cut, which leaves NULs or a part of the last blocks."""
    path, good = tmp_path / "a", b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(good + tail)
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
    assert cut_lines(path, lambda row: row["step"] <= 2) == [{"step": 1}, {"step": 2}] and path.read_bytes() == good
    (said,) = capsys.readouterr().out.splitlines()
    assert said == f"{path}: the last {len(tail)} bytes, after 2 lines, cannot be read and are removed"
    assert cut_lines(path, lambda row: True) == [{"step": 1}, {"step": 2}] and capsys.readouterr().out == ""


def test_a_file_cut_at_any_byte_is_read(tmp_path):
    text = b'{"step": 1, "a": null}\n{"step": 2, "b": "\\u2028 \xe2\x80\xa8"}\n'
    for length in range(len(text) + 1):
        (tmp_path / "a").write_bytes(text[:length])
        assert [row["step"] for row in read_lines(tmp_path / "a")] == [1, 2][: text[:length].count(b"\n")]
