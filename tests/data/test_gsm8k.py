import json
import pathlib
import subprocess
import sys

import httpx
import pyarrow.parquet as pq
import pytest

from jppo.data import gsm8k
from jppo.data.prompts import read_prompts
from jppo.data.tokenizer import load_tokenizer
from jppo.errors import UserError

SHARED = pathlib.Path(__file__).resolve().parents[3] / "shared"


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_equals_verls_files_row_by_row(shared, tmp_path, split, count):
    assert gsm8k.convert(shared / "data/gsm8k", tmp_path)[str(tmp_path / f"{split}.parquet")] == count
    ours, verls = (pq.read_table(d / f"{split}.parquet").to_pylist() for d in (tmp_path, shared / "data/gsm8k-verl"))
    assert ours == verls


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """GSM8K as tensorflow-datasets has it, built from the JSON lines beside the checkout."""
    pytest.importorskip("tensorflow_datasets")
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}: real data are not beside this checkout")
    out = tmp_path_factory.mktemp("gsm8k")
    counts = gsm8k.convert(SHARED / "data/gsm8k", out, tfds=True)
    assert counts == {f"tfds:gsm8k/train@{out}": 7473, f"tfds:gsm8k/test@{out}": 1319}
    return out


@pytest.mark.parametrize("split", ["train", "test"])
def test_tfds_and_verls_files_give_the_same_prompts_and_answers(shared, prepared, split):
    tokenizer = load_tokenizer(str(shared / "tokenizers/qwen2.5"))
    ours, verls = (
        read_prompts(files, tokenizer=tokenizer, max_prompt_length=1024, filter_overlong=True).prompts
        for files in (f"tfds:gsm8k/{split}@{prepared}", str(shared / f"data/gsm8k-verl/{split}.parquet"))
    )
    assert len(ours) == len(verls) == {"train": 7473, "test": 1319}[split]
    for a, b in zip(ours, verls, strict=True):
        assert (a.ids == b.ids).all() and a.uid.split(":")[1] == b.uid.split(":")[1]
        assert (a.messages, a.ground_truth, a.data_source, a.extra) == (
            b.messages, b.ground_truth, b.data_source, b.extra,
        )  # fmt: skip
    if split == "train":
        lengths = [len(p.ids) for p in ours]
        assert (min(lengths), max(lengths)) == (56, 256) and round(sum(lengths) / len(lengths), 1) == 103.6


def test_tfds_is_built_and_read_without_tensorflow(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "é", "answer": "a\n#### 1,234"}))
    code = f"""
import sys
from jppo.data import gsm8k, rows
sys.argv = ["gsm8k", "--out", {str(tmp_path / "out")!r}, "--from", {str(tmp_path)!r}, "--tfds"]
gsm8k.main()
gsm8k.main()  # in place of what was there
[source] = rows.read_sources("tfds:gsm8k/test@{tmp_path / "out"}", "data.val_files")
[row] = source.rows
print(source.name, row.columns["extra_info"], row.columns["reward_model"]["ground_truth"], row.place)
assert "tensorflow" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, built, last = done.stdout.splitlines()
    assert built == f"tfds:gsm8k/test@{tmp_path / 'out'}: 1 rows"
    assert last.startswith("gsm8k/test {'answer': 'a\\n#### 1,234', 'index': 0, 'question': 'é', 'split': 'test'} 1234")
    assert last.endswith(f"tfds:gsm8k/test@{tmp_path / 'out'}, row 1")


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
