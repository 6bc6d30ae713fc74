import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jppo.config import UserError
from jppo.data.prompts import read_prompts
from jppo.data.tokenizer import load_tokenizer

GOOD = {"prompt": "1+2=", "ground_truth": "3", "data_source": "arithmetic"}
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def write(tmp_path, *rows, name="d.jsonl"):
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(list(rows)))
    else:
        path.write_bytes(b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows))
    return str(path)


def read(files, tokenizer, length=100, keep=True, **kw):
    return read_prompts(files, tokenizer=tokenizer, max_prompt_length=length, filter_overlong=keep, **kw)


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.parquet"])
def test_the_plain_schema(tmp_path, characters, name):
    [prompt] = read(write(tmp_path, GOOD | {"level": 2}, name=name), characters).prompts
    assert (prompt.uid, prompt.data_source, prompt.messages) == ("d:1", "arithmetic", "1+2=")
    assert prompt.ids.dtype == np.int32 and prompt.ids.tolist() == [3, 12, 4, 13]  # 1 + 2 =
    assert prompt.ground_truth == "3" and prompt.extra == {"level": 2}


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_verls_schema(tmp_path, characters, name):
    characters.chat_template = TEMPLATE
    row = {
        "prompt": [{"role": "user", "content": "4+5"}],
        "reward_model": {"style": "rule", "ground_truth": "9"},
        "data_source": "arithmetic",
        "extra_info": {"index": 0},
    }
    [prompt] = read(write(tmp_path, row, name=name), characters).prompts
    assert prompt.messages == row["prompt"] and prompt.ids.tolist() == [6, 12, 7, 13]  # the template adds =
    assert prompt.ground_truth == "9" and prompt.extra == {"extra_info": {"index": 0}}


def test_text_gets_the_bos_that_the_tokenizer_adds(tmp_path, shared):
    tokenizer = load_tokenizer(str(shared / "models/stories260k"))
    [prompt] = read(write(tmp_path, GOOD | {"prompt": "Once"}), tokenizer).prompts
    assert prompt.ids[0] == tokenizer.bos_token_id and (prompt.ids[1:] != tokenizer.bos_token_id).all()


def test_overlong_prompts_are_counted_or_refused(tmp_path, characters):
    files = write(tmp_path, GOOD, GOOD | {"prompt": "11+22="}, GOOD)
    read_set = read(files, characters, length=4)
    assert [p.uid for p in read_set.prompts] == ["d:1", "d:3"] and read_set.overlong == 1
    with pytest.raises(UserError, match=r"d\.jsonl, line 2: the prompt has 6 tokens.*max_prompt_length=4"):
        read(files, characters, length=4, keep=False)
    with pytest.raises(UserError, match=r"all 3 prompts are longer than .*=3 tokens \(the shortest has 4\)"):
        read(files, characters, length=3)


def test_several_files_have_uids_of_their_own(tmp_path, characters):
    (tmp_path / "a").mkdir()
    one, two = write(tmp_path, GOOD), write(tmp_path / "a", GOOD)
    uids = [p.uid for p in read(f"{one}, {two}", characters).prompts]
    assert len(set(uids)) == 2
    with pytest.raises(UserError, match="twice"):
        read(f"{one},{one}", characters)


def test_max_samples_takes_the_first_rows(tmp_path, characters):
    files = write(tmp_path, *[GOOD] * 5)
    assert len(read(files, characters, max_samples=2).prompts) == 2
    assert len(read(files, characters, max_samples=-1).prompts) == 5
    with pytest.raises(UserError, match="max_samples=0"):
        read(files, characters, max_samples=0)


def without(column):
    return {k: v for k, v in GOOD.items() if k != column}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (without("prompt"), "has no 'prompt'"),
        (GOOD | {"prompt": " "}, "prompt is empty"),
        (GOOD | {"prompt": []}, "prompt is empty"),
        (GOOD | {"prompt": 7}, "of type int; it must be text or chat messages"),
        (GOOD | {"prompt": [{"role": "user"}]}, "has no 'content'"),
        (GOOD | {"prompt": [{"role": "user", "content": [1]}]}, "must be text"),
        (without("ground_truth"), "has no answer"),
        (GOOD | {"ground_truth": ""}, "ground_truth is empty"),
        (GOOD | {"ground_truth": 3}, "ground_truth is 3, of type int"),
        (GOOD | {"reward_model": {"ground_truth": "4"}}, "keep one"),
        (GOOD | {"reward_model": "rule"}, "must be an object"),
        (without("data_source"), "has no 'data_source'"),
        (GOOD | {"prompt": "1+2=<eos>"}, "ends with the end token"),
        (GOOD | {"prompt": [{"role": "user", "content": "1"}]}, "no chat template"),
        (["not an object"], "must be a JSON object"),
        (b'{"prompt": ', "is not JSON"),
        (b'{"prompt": "caf\xe9"}', "is not UTF-8"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, characters, row, said):
    files = write(tmp_path, GOOD, b"", row)  # the blank line counts, as in an editor
    with pytest.raises(UserError, match=r"d\.jsonl, line 3") as e:
        read(files, characters)
    assert said in str(e.value) and "\n" not in str(e.value)


def test_a_bad_parquet_row_is_named(tmp_path, characters):
    files = write(tmp_path, GOOD, GOOD | {"ground_truth": None}, name="d.parquet")
    with pytest.raises(UserError, match=r"d\.parquet, row 2 has no answer"):
        read(files, characters)


def test_a_refusal_of_the_chat_template_is_named(tmp_path, characters):
    characters.chat_template = TEMPLATE
    files = write(tmp_path, GOOD | {"prompt": [{"role": "system", "content": "1"}]})
    with pytest.raises(UserError, match=r"line 1: the chat template refuses the prompt: no system role"):
        read(files, characters)


def test_bad_files_are_named(tmp_path, characters):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "data.csv").write_text("a")
    for files, said in {
        "": "names no file",
        f"{tmp_path}/none.jsonl": "no file",
        f"{tmp_path}/data.csv": "'.csv'",
        f"{tmp_path}/empty.jsonl": "has no rows",
        f"{tmp_path}/bad.parquet": "not a readable parquet file",
    }.items():
        with pytest.raises(UserError, match=said):
            read(files, characters)


def test_gsm8k_prompts_have_the_published_lengths(shared):
    tokenizer = load_tokenizer(str(shared / "tokenizers/qwen2.5"))
    read_set = read(str(shared / "data/gsm8k-verl/train.parquet"), tokenizer, length=1024)
    lengths = [len(p.ids) for p in read_set.prompts]
    assert (len(lengths), min(lengths), max(lengths), read_set.overlong) == (7473, 56, 256, 0)
    assert np.mean(lengths) == pytest.approx(103.647, abs=1e-3)
    first = read_set.prompts[0]
    whole = tokenizer.apply_chat_template(first.messages, add_generation_prompt=True, return_dict=False)
    assert first.ids.tolist() == whole
