import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jppo.data.rows import read_rows
from jppo.settings import UserError


def test_row_groups_are_numbered_through(tmp_path):
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"n": list(range(10))}), path, row_group_size=3)
    rows = read_rows(path)
    assert [row.columns["n"] for row in rows] == list(range(10)) and [row.number for row in rows] == list(range(1, 11))
    assert rows[6].place == f"{path}, row 7"


def test_damage_in_a_parquet_file_is_named_by_its_rows(tmp_path):
    path = tmp_path / "d.parquet"
    words = [f"word {i} {'x' * 50}" for i in range(40)]
    pq.write_table(pa.table({"t": words}), path, row_group_size=20, compression="gzip", use_dictionary=False)
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[start : start + 60] = bytes(60)
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"d\.parquet, rows 21 to 40 cannot be read") as e:
        read_rows(path)
    assert "\n" not in str(e.value)
    path.write_bytes(bytes(data[: len(data) // 2]))
    with pytest.raises(UserError, match="not a readable parquet file"):
        read_rows(path)


def test_text_in_parquet_that_is_not_utf8_is_named_by_its_row(tmp_path):
    path = tmp_path / "d.parquet"
    raw = pa.array([b"a", b"caf\xe9", b"b"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"t": text}), path)
    with pytest.raises(UserError, match=r"d\.parquet, row 2 is not UTF-8"):
        read_rows(path)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"a": 1}))

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(UserError, match=r"d\.jsonl cannot be read \(Permission denied\)"):
        read_rows(path)


def test_one_object_over_several_lines_is_a_row_and_two_are_an_error(tmp_path):
    (tmp_path / "d.json").write_text(json.dumps({"a": 1}, indent=2))
    assert [row.columns for row in read_rows(tmp_path / "d.json")] == [{"a": 1}]
    (tmp_path / "d.json").write_text(json.dumps({"a": 1}, indent=2) * 2)
    with pytest.raises(UserError, match=r"d\.json is not JSON: Extra data"):
        read_rows(tmp_path / "d.json")
    (tmp_path / "a.json").write_text('[{"a": 1}, {"a": ]')
    with pytest.raises(UserError, match=r"a\.json is not JSON: .*line 1 column 18"):
        read_rows(tmp_path / "a.json")
