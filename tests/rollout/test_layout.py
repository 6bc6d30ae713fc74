import json
import os

import ml_dtypes
import numpy as np
import pytest

from jppo.rollout.vllm import layout

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.bias": np.array([1.5, -2.0, 0.25], ml_dtypes.bfloat16),
    "c.weight": np.full((5, 4), 7, np.float32).T,  # not contiguous
}
SHAPES = {"a.weight": (2, 3), "b.bias": (3,), "c.weight": (4, 5)}


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "weights"
    with open(path, "wb") as file:
        entries = layout.write(file.fileno(), TENSORS.items())
    return path, entries


def test_bytes_lie_where_the_entries_say(written):
    path, entries = written
    data = path.read_bytes()
    assert [(e.name, e.dtype, e.shape) for e in entries] == [
        ("a.weight", "float32", (2, 3)),
        ("b.bias", "bfloat16", (3,)),
        ("c.weight", "float32", (4, 5)),
    ]
    assert [e.offset for e in entries] == [0, 64, 128]  # 24 and 6 bytes, each on a line of 64
    for e in entries:
        assert data[e.offset : e.offset + e.nbytes] == np.ascontiguousarray(TENSORS[e.name]).tobytes()


def test_a_good_file_is_mapped(written):
    path, entries = written
    data = layout.check(str(path), entries, SHAPES)
    assert np.array_equal(np.frombuffer(data, np.float32, 6).reshape(2, 3), TENSORS["a.weight"])


def test_entries_survive_json(written):
    _, entries = written
    assert layout.unpack(json.loads(json.dumps(layout.pack_bytes(entries)))) == entries


def test_a_shorter_second_write_leaves_nothing_of_the_first(tmp_path):
    with open(tmp_path / "w", "wb") as file:
        layout.write(file.fileno(), TENSORS.items())
        entries = layout.write(file.fileno(), [("a.weight", TENSORS["a.weight"] + 1)])
    assert os.path.getsize(tmp_path / "w") == 64
    layout.check(str(tmp_path / "w"), entries, {"a.weight": (2, 3)})


def refusal(path, entries, expected) -> str:
    with pytest.raises(layout.WeightsRefused) as caught:
        layout.check(str(path), entries, expected)
    return str(caught.value)


def test_a_wrong_shape_is_named(written):
    path, entries = written
    message = refusal(path, entries, SHAPES | {"c.weight": (5, 4)})
    assert "c.weight has shape [4, 5], the served model's is [5, 4]" in message


def test_a_cut_file_is_named_by_its_first_lost_tensor(written):
    path, entries = written
    os.truncate(path, 65)
    assert "the file is truncated: b.bias ends at byte 70, the file at 65" in refusal(path, entries, SHAPES)


def test_an_empty_or_missing_file_is_refused(written, tmp_path):
    path, entries = written
    os.truncate(path, 0)
    assert str(path) in refusal(path, entries, SHAPES)
    assert "nowhere" in refusal(tmp_path / "nowhere", entries, SHAPES)
