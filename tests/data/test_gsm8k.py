import json

import httpx
import pyarrow.parquet as pq
import pytest

from jppo.config import UserError
from jppo.data import gsm8k


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_equals_verls_files_row_by_row(shared, tmp_path, split, count):
    assert gsm8k.convert(shared / "data/gsm8k", tmp_path)[split] == count
    ours, verls = (pq.read_table(d / f"{split}.parquet").to_pylist() for d in (tmp_path, shared / "data/gsm8k-verl"))
    assert ours == verls


def test_a_bad_answer_is_named_and_nothing_is_written(tmp_path):
    good = {"question": "q", "answer": "a\n#### 1,234"}
    for split, rows in {"train": [good], "test": [good, {"question": "q", "answer": "no number"}]}.items():
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=r"test\.jsonl, line 2: the answer must end with"):
        gsm8k.convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_exit_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gsm8k", "--out", str(tmp_path / "out"), "--from", str(tmp_path)])
    with pytest.raises(SystemExit) as e:
        gsm8k.main()
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: no ") and err.count("\n") == 1 and "train.jsonl" in err


def test_without_a_network_the_error_names_the_files_and_the_way_out(tmp_path, monkeypatch):
    def unreachable(url, **_):
        raise httpx.ConnectError("no network", request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", unreachable)
    with pytest.raises(UserError, match=r"train\.jsonl could not be fetched.*--from"):
        gsm8k.download(tmp_path)
