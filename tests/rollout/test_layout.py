import json
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jppo.rollout.vllm import layout, publish

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
        entries = publish.write_tensors(file.fileno(), TENSORS.items())
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
    data = layout.map_checked(str(path), entries, SHAPES)
    assert np.array_equal(np.frombuffer(data, np.float32, 6).reshape(2, 3), TENSORS["a.weight"])


def test_entries_survive_json(written):
    _, entries = written
    assert layout.unpack_entries(json.loads(json.dumps(layout.pack_bytes(entries)))) == entries


def test_a_shorter_second_write_leaves_nothing_of_the_first(tmp_path):
    with open(tmp_path / "w", "wb") as file:
        publish.write_tensors(file.fileno(), TENSORS.items())
        entries = publish.write_tensors(file.fileno(), [("a.weight", TENSORS["a.weight"] + 1)])
    assert os.path.getsize(tmp_path / "w") == 64
    layout.map_checked(str(tmp_path / "w"), entries, {"a.weight": (2, 3)})


def refusal(path, entries, expected) -> str:
    with pytest.raises(layout.WeightsRefused) as caught:
        layout.map_checked(str(path), entries, expected)
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


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1e-4, 1e-3, 0.03, 0.5, 1]), st.sampled_from(["u2", "u4"]))
def test_a_decoded_block_is_the_new_one_and_takes_no_more_bytes_than_two_of_a_gap(seed, share, dtype):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, rng.integers(1, 200_000)).astype(dtype)
    new = np.where(rng.random(len(old)) < share, old ^ 1, old)
    positions = layout.changed_positions(old, new)
    assert np.array_equal(positions, np.flatnonzero(old != new))
    encoded = layout.encode_block(new, positions)
    decoded, used = layout.decode_block(old, memoryview(encoded))
    assert np.array_equal(decoded, new) and decoded.dtype == new.dtype and used == len(encoded)
    entries = int((old != new).sum()) + len(new) // 65536  # a gap has 16 bits
    assert len(encoded) <= 8 + min(new.nbytes, entries * (new.itemsize + 2))


@given(st.binary(max_size=40))
def test_bytes_of_another_origin_are_refused_or_decoded_within_the_block(changes):
    try:
        new, used = layout.decode_block(np.zeros(5, np.uint16), memoryview(changes))
    except layout.WeightsRefused:
        return
    assert len(new) == 5 and used <= len(changes)
