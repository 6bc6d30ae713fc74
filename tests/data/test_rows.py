import json
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jppo.data.prompts import read_prompts
from jppo.data.rows import _hide_gpus, read_rows, read_sources, tfds_spec
from jppo.errors import UserError

CLASSES = """
import dataclasses

@dataclasses.dataclass
class Sums:
    limit: "str"
    tokenizer: object
    def __iter__(self):
        for i in range(1, int(self.limit) + 1):
            yield {"prompt": f"{i}+{i}=", "ground_truth": str(2 * i), "data_source": "arithmetic", "level": i}

def Failing(entry, tokenizer):
    yield {"prompt": "1"}
    raise KeyError("no such column")

Strings = lambda entry, tokenizer: ["a"]
Empty = lambda entry, tokenizer: []
Refusing = lambda entry: []
NotOne = 7
"""


@pytest.fixture
def classes(tmp_path):
    (tmp_path / "mine.py").write_text(CLASSES)
    return str(tmp_path / "mine.py")


def test_rows_by_a_class_of_the_users_own(classes, characters):
    found = read_prompts(
        "2,3",
        tokenizer=characters,
        max_prompt_length=9,
        filter_overlong=True,
        custom_cls=f"{classes}:Sums",
    )
    assert [p.uid for p in found.prompts] == ["2:1", "2:2", "3:1", "3:2", "3:3"]
    assert [p.messages for p in found.prompts[:2]] == ["1+1=", "2+2="] and found.prompts[1].extra == {"level": 2}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("{}:Failing", r"mine\.py:Failing of 'x' failed after row 1 \(KeyError: 'no such column'\)"),
        ("{}:Strings", r"mine\.py:Strings of 'x', row 1 is 'a'; each row must be a dict"),
        ("{}:Empty", r"mine\.py:Empty of 'x' has no rows"),
        ("{}:Refusing", r"failed before the first row \(TypeError: .*unexpected keyword argument 'tokenizer'"),
        ("{}:NotOne", "'NotOne' is of type"),
        ("{}:Other", "defines no 'Other'"),
        ("{}x:Other", "must be PATH.py:NAME or MODULE:NAME"),
        ("{}", "must be PATH.py:NAME or MODULE:NAME"),
        ("/none/a.py:B", "no file /none/a.py"),
    ],
)
def test_a_class_that_does_not_do_is_named(classes, spec, said):
    with pytest.raises(UserError, match=said) as e:
        read_sources("x", "data.train_files", custom_cls=spec.format(classes))
    assert "\n" not in str(e.value)


def test_a_row_of_a_class_is_named(classes, characters):
    with pytest.raises(UserError, match=r"mine\.py:Sums of '1', row 1: the prompt is text"):
        read_prompts(
            "1", tokenizer=characters, max_prompt_length=9, filter_overlong=True, custom_cls=f"{classes}:Sums",
            system_prompt="9",
        )  # fmt: skip


def test_a_file_of_classes_that_cannot_be_run(tmp_path):
    (tmp_path / "bad.py").write_text("1 +")
    with pytest.raises(UserError, match=r"bad\.py cannot be run \(SyntaxError"):
        read_sources("x", "data.train_files", custom_cls=f"{tmp_path / 'bad.py'}:A")


def test_a_data_set_of_the_hub_is_read_by_datasets(monkeypatch):
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        if split == "tst":
            raise ValueError('Unknown split "tst"')
        return [{"question": "1+1", "answer": "2"}] if split == "train" else []

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    entries = "hub:openai/gsm8k:main/train, hub:squad/train"
    one, other = read_sources(entries, "data.train_files", columns={"prompt": "question"})
    assert asked == [("openai/gsm8k", "main", "train"), ("squad", None, "train")]
    assert (one.name, other.name) == ("openai/gsm8k:main/train", "squad/train")
    assert one.rows[0].columns == {"answer": "2", "prompt": "1+1"} and one.rows[0].place.endswith("train, row 1")
    for entry, said in (
        ("hub:squad/tst", r"cannot be read \(ValueError: Unknown split"),
        ("hub:squad/none", "has no rows"),
        ("hub:squad", "must be hub:NAME/SPLIT"),
        ("openai/gsm8k", "of the hub: hub:openai/gsm8k/train"),
    ):
        with pytest.raises(UserError, match=said):
            read_sources(entry, "data.train_files")


def test_without_datasets_the_remedy_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'jppo\[hub\]', or .* hf download --repo-type dataset squad "):
        read_sources("hub:squad/train", "data.train_files")


@pytest.mark.parametrize("entry", ["tfds:gsm8k", "tfds:/train", "tfds:gsm8k/", "tfds:gsm8k/train@"])
def test_a_split_that_is_not_spelt_out(entry):
    with pytest.raises(UserError, match=r"data.val_files: .* must be tfds:NAME/SPLIT or tfds:NAME/SPLIT@DIR"):
        read_sources(entry, "data.val_files")


def test_what_a_split_is_made_of():
    assert tfds_spec("tfds:gsm8k/main:1.0.0/train[:10%]@/d/e", "")[1:] == ("gsm8k/main:1.0.0", "train[:10%]", "/d/e")
    assert tfds_spec("tfds:gsm8k/test", "")[1:] == ("gsm8k", "test", None)


def test_without_tensorflow_datasets_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"pip install 'jppo\[tfds\]'"):
        read_sources("tfds:gsm8k/train", "data.train_files")


def test_what_is_not_prepared_is_one_line(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    with pytest.raises(UserError, match=r"tfds:nonesuch/train@.* cannot be read .* must have been prepared") as e:
        read_sources(f"tfds:nonesuch/train@{tmp_path}", "data.train_files")
    assert "\n" not in str(e.value)


def test_features_become_the_types_of_json(tmp_path):
    store = pytest.importorskip("tensorflow_datasets")
    f = store.features
    features = {
        "turns": f.Sequence({"role": f.Text(), "content": f.Text()}),
        "words": f.Sequence(f.Text()),
        "level": np.int64,
        "nested": {"share": np.float32, "good": np.bool_},
        "raw": f.Tensor(shape=(2,), dtype=np.int32),
    }
    row = {
        "turns": [{"role": "user", "content": "é"}, {"role": "assistant", "content": ""}],
        "words": ["a", "b"],
        "level": 3,
        "nested": {"share": 0.5, "good": True},
        "raw": [1, 2],
    }

    with store.core.registered.skip_registration():

        class Builder(store.core.GeneratorBasedBuilder):
            name = "many_types"
            VERSION = store.core.Version("1.0.0")

            def _info(self):
                return store.core.DatasetInfo(builder=self, features=f.FeaturesDict(features), disable_shuffling=True)

            def _split_generators(self, dl_manager):
                return {"train": self._generate_examples()}

            def _generate_examples(self):
                yield from enumerate([row, row | {"turns": [], "words": []}])

    Builder.code_path = None
    Builder(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    [source] = read_sources(f"tfds:many_types/train@{tmp_path}", "data.train_files")
    assert [r.columns for r in source.rows] == [row, row | {"turns": [], "words": []}]
    [one] = read_sources(f"tfds:many_types/train[1:]@{tmp_path}", "data.train_files")
    assert len(one.rows) == 1 and one.rows[0].number == 1


def test_tensorflow_gets_no_gpu(monkeypatch):
    asked = []
    config = types.SimpleNamespace(set_visible_devices=lambda *args: asked.append(args))
    monkeypatch.setitem(sys.modules, "tensorflow", types.SimpleNamespace(config=config))
    _hide_gpus(tfds_spec("tfds:a/b", ""))
    assert asked == [([], "GPU")]

    def late(*_):
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    config.set_visible_devices = late
    with pytest.raises(UserError, match="TensorFlow has taken the GPU already"):
        _hide_gpus(tfds_spec("tfds:a/b", ""))


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


def test_csv_has_quoted_values_and_all_are_text(tmp_path):
    path = tmp_path / "d.csv"
    path.write_bytes('\ufeffquestion,answer\r\n"1, or\n""2""?",007\r\n\r\n3?,\r\n'.encode())
    rows = read_rows(path)
    assert [row.columns for row in rows] == [
        {"question": '1, or\n"2"?', "answer": "007"},
        {"question": "3?", "answer": ""},
    ]
    assert [row.place for row in rows] == [f"{path}, line 3", f"{path}, line 5"]  # where they end


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a,b\n1,2\n1,2,3\n", "line 3 has not the columns a, b; quote values that have ','"),
        (b"a;b\n1;2;3\n", "line 2 has not the columns a, b; quote values that have ';'"),
        (b"a,b,a\n1,2,3\n", "line 1 names the column 'a' twice; rename or remove one"),
        (b"a,b\n1,2\na,b\n", "line 3 repeats the names of the columns; remove the line"),
        (b"a,b\n1\n", "line 2 has not the columns a, b"),
        (b'a,b\n1,"2\n', "line 2 is not CSV: unexpected end of data; quotes must open and close a whole value"),
        (b"a\n\xff\n", "is not UTF-8"),
        (b"a,b\n", "has no rows"),
        (b'a,b\n"1", "2"\n', "line 2 has a space before the quotes of ' \"2\"'; remove it"),
    ],
)
def test_csv_that_is_none_names_its_line(tmp_path, text, said):
    (tmp_path / "d.csv").write_bytes(text)
    with pytest.raises(UserError, match=said):
        read_rows(tmp_path / "d.csv")


@pytest.mark.parametrize("mark", (";", "\t"))
def test_csv_of_a_spreadsheet_has_semicolons_or_tabs(tmp_path, mark):
    (tmp_path / "d.csv").write_bytes(f'\ufeffask{mark}answer\r\n"1,5{mark} 2"{mark}3,5\r\n'.encode())
    (row,) = read_rows(tmp_path / "d.csv")
    assert row.columns == {"ask": f"1,5{mark} 2", "answer": "3,5"}


@pytest.mark.parametrize(
    "text",
    [
        '"ask, please";answer (a, b)\n1;2\n',
        "\n\nask, please\tanswer (a, b)\n1\t2\n",
        "sep=;\nask, please;answer (a, b)\n1;2\n",
    ],
)
def test_the_separator_is_the_one_by_which_the_rows_fit_their_names(tmp_path, text):
    (tmp_path / "d.csv").write_text(text)
    assert [row.columns for row in read_rows(tmp_path / "d.csv")] == [{"ask, please": "1", "answer (a, b)": "2"}]


def test_a_long_value_of_a_csv_is_read(tmp_path):
    (tmp_path / "d.csv").write_text(f"ask,answer\n{'x' * 200_000},1\n")
    assert len(read_rows(tmp_path / "d.csv")[0].columns["ask"]) == 200_000


def test_a_name_that_an_object_or_a_table_has_twice_is_named(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"a": 1}\n{"a": {"b": 1, "b": 2}}\n')
    with pytest.raises(UserError, match=r"d\.jsonl, line 2 is not JSON: an object has 'b' twice"):
        read_rows(tmp_path / "d.jsonl")
    pq.write_table(pa.table([["1"], ["2"]], names=["a", "a"]), tmp_path / "d.parquet")
    with pytest.raises(UserError, match="has the column 'a' twice; rename or remove one"):
        read_rows(tmp_path / "d.parquet")


def test_a_comma_in_a_name_is_named(tmp_path):
    (tmp_path / "a,b.csv").write_text("a\n1\n")
    with pytest.raises(UserError, match=r"data\.train_files: commas separate sources; rename .*a,b\.csv"):
        read_sources(str(tmp_path / "a,b.csv"), "data.train_files")


def test_a_slice_of_a_file_has_the_rows_of_pythons_slice(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text("a\n" + "".join(f"{i}\n" for i in range(7)))

    def values(part):
        [source] = read_sources(f"{path}{part}", "data.train_files")
        assert source.name == "d"
        return [int(row.columns["a"]) for row in source.rows]

    numbers = list(range(7))
    found = [values(part) for part in ("[:-2]", "[-2:]", "[2:4]", "[:]", "")]
    assert found == [numbers[:-2], numbers[-2:], numbers[2:4], numbers, numbers]
    with pytest.raises(UserError, match=r"d\.csv\[7:None\] has no rows"):
        values("[7:]")
