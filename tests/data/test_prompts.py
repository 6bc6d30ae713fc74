import json
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jppo.data import prompts
from jppo.data.prompts import read_prompts
from jppo.data.tokenizer import Renderer, load_tokenizer
from jppo.errors import UserError

GOOD = {"prompt": "1+2=", "ground_truth": "3", "data_source": "arithmetic"}


def without(column):
    return {k: v for k, v in GOOD.items() if k != column}


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
@pytest.mark.parametrize(("truth", "text"), [(3, "3"), (-2.5, "-2.5"), (True, "true"), ([1, 2], "[1, 2]")])
def test_a_ground_truth_that_is_no_text_becomes_json(tmp_path, characters, name, truth, text):
    [prompt] = read(write(tmp_path, GOOD | {"ground_truth": truth}, name=name), characters).prompts
    assert prompt.ground_truth == text


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


def test_answer_and_source_may_be_left_out_where_the_reward_reads_neither(tmp_path, characters):
    bare = write(tmp_path, {"prompt": "1+2=", "level": 2}, {"prompt": "3+4=", "ground_truth": ""})
    one, other = read(bare, characters, needed=()).prompts
    assert (one.data_source, one.ground_truth, one.extra) == ("unknown", "", {"level": 2})
    assert (other.data_source, other.ground_truth) == ("unknown", "")
    for needed, said in (
        (
            ("ground_truth",),
            "line 1 has no answer.*; name its column by data.ground_truth_key, or score by reward.function=FILE.py",
        ),
        (("data_source",), "line 1 has no 'data_source', which names its rule.*reward.grader"),
    ):
        with pytest.raises(UserError, match=said):
            read(bare, characters, needed=needed)


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
        (GOOD | {"ground_truth": []}, "ground_truth is [], of type list"),
        (GOOD | {"reward_model": {"ground_truth": "4"}}, "keep one"),
        (GOOD | {"reward_model": "rule"}, "must be an object"),
        (without("data_source"), "has no 'data_source'"),
        (GOOD | {"prompt": "1+2=<eos>"}, "ends with the end token"),
        (GOOD | {"prompt": [{"role": "user", "content": "1"}]}, "in the form of chat messages, but line 1"),
        ({"reward_model": {"ground_truth": "3"}} | without("ground_truth"), "in the form of reward_model.ground_truth"),
        (GOOD | {"prompt": "1\ud83d="}, "half of a surrogate pair"),
        (GOOD | {"prompt": [{"role": "user", "content": "\udc00"}]}, "half of a surrogate pair"),
        (GOOD | {"extra_info": "x"}, "extra_info is of type str; it must be an object"),
        (["not an object"], "must be a JSON object"),
        (b'{"prompt": ', "is not JSON"),
        (b'{"prompt": "caf\xe9"}', "is not UTF-8"),
        ('{"prompt": "1"}'.encode("utf-16"), "is not UTF-8"),
        (b'{"prompt": ' + b"7" * 5000 + b"}", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
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
    (tmp_path / "data.txt").write_text("a")
    for files, said in {
        "": "names no file",
        f"{tmp_path}/none.jsonl": "no file",
        f"{tmp_path}/data.txt": "'.txt'",
        f"{tmp_path}/empty.jsonl": "has no rows",
        f"{tmp_path}/bad.parquet": "not a readable parquet file",
    }.items():
        with pytest.raises(UserError, match=said):
            read(files, characters)


def test_chat_messages_need_a_template(tmp_path, characters):
    files = write(tmp_path, GOOD | {"prompt": [{"role": "user", "content": "1"}]})
    with pytest.raises(UserError, match=r"line 1: .* the tokenizer has no chat template"):
        read(files, characters)


@pytest.mark.parametrize(
    ("truncation", "tokens"),  # of 1 2 3 4 5 6 7, which are 3 4 5 6 7 8 9 to the tokenizer
    [("left", [5, 6, 7, 8, 9]), ("right", [3, 4, 5, 6, 7]), ("middle", [3, 4, 7, 8, 9])],
)
def test_an_overlong_prompt_is_cut_as_verl_does(tmp_path, characters, truncation, tokens):
    files = write(tmp_path, GOOD | {"prompt": "1234567"}, GOOD)
    cut = read(files, characters, length=5, keep=False, truncation=truncation)
    assert [p.ids.tolist() for p in cut.prompts] == [tokens, [3, 12, 4, 13]]
    assert (cut.overlong, cut.truncated) == (0, 1)
    with pytest.raises(UserError, match=f"data.truncation='{truncation}' .* set the one to error"):
        read(files, characters, length=5, truncation=truncation)


def test_the_system_prompt_is_put_before_messages_that_have_none(tmp_path, characters):
    characters.chat_template = (
        "{% for m in messages %}{{ '+' if m.role == 'system' else '=' }}{{ m.content }}{% endfor %}"
    )
    own = [{"role": "system", "content": "9"}, {"role": "user", "content": "1"}]
    files = write(tmp_path, *(GOOD | {"prompt": messages} for messages in (own[1:], own)))
    with_one, with_own = read(files, characters, system_prompt="42").prompts
    assert characters.decode(with_one.ids) == "+42=1" and characters.decode(with_own.ids) == "+9=1"
    assert with_one.messages == [{"role": "system", "content": "42"}, own[1]] and with_own.messages == own
    assert [characters.decode(p.ids) for p in read(files, characters).prompts] == ["=1", "+9=1"]
    [made] = read(write(tmp_path, GOOD), characters, system_prompt="42", prompt_role="user").prompts
    assert made.messages == [{"role": "system", "content": "42"}, {"role": "user", "content": GOOD["prompt"]}]
    with pytest.raises(UserError, match=r"line 1: the prompt is text.* data.system_prompt; make it chat messages"):
        read(write(tmp_path, GOOD), characters, system_prompt="42")


def test_what_data_say_is_never_code(tmp_path, characters, monkeypatch):
    characters.chat_template = TEMPLATE
    spelt = "{{ 7 * 7 }}{% raise %}__import__('os')"
    rows = [{**GOOD, "prompt": [{"role": "user", "content": spelt}], "ground_truth": spelt}]
    seen = []
    monkeypatch.setattr(Renderer, "all", spy(Renderer.all, seen))
    [prompt] = read(write(tmp_path, *rows), characters).prompts
    assert seen == [[spelt + "="]] and prompt.ground_truth == spelt


def spy(function, seen):
    def wrapped(*args, **kw):
        seen.append(function(*args, **kw))
        return seen[-1]

    return wrapped


def test_many_rows_are_tokenised_in_blocks_that_change_nothing(tmp_path, characters, monkeypatch):
    rows = [GOOD | {"prompt": f"{i}="} for i in range(25)]
    whole = read(write(tmp_path, *rows), characters)
    monkeypatch.setattr(prompts, "_BLOCK", 4)
    monkeypatch.setattr(prompts, "SHOWN_FROM", 10)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for a, b in zip(read(write(tmp_path, *rows), characters).prompts, whole.prompts, strict=True):
        assert a.ids.tolist() == b.ids.tolist() and a.uid == b.uid


def test_long_tokenising_says_how_far_it_is_where_there_is_no_terminal(tmp_path, characters, monkeypatch, capsys):
    monkeypatch.setattr(prompts, "_BLOCK", 4)
    monkeypatch.setattr(prompts, "EVERY_S", 0.0)
    read(write(tmp_path, *[GOOD] * 10), characters)
    assert capsys.readouterr().err.splitlines() == [f"tokenising prompts, {n} of 10" for n in (4, 8, 10)]


def test_parts_say_which_prompts_are_of_which_source(tmp_path, characters):
    b = write(tmp_path, GOOD, GOOD | {"prompt": "11111="}, GOOD, name="b.jsonl")
    a = write(tmp_path, GOOD, name="a.jsonl")
    found = read(f"{b},{a}", characters, length=4)
    assert [(p.name, p.indices.tolist(), p.weight) for p in found.parts] == [("b", [0, 1], None), ("a", [2], None)]
    mixed = prompts.mixture(found, "a=1,b=3", batch_size=2)
    assert [(p.name, p.indices.tolist(), p.weight) for p in mixed.parts] == [("a", [2], 0.25), ("b", [0, 1], 0.75)]
    assert prompts.mixture(found, "", batch_size=2) is found


def test_gsm8k_prompts_have_the_published_lengths(shared):
    tokenizer = load_tokenizer(str(shared / "tokenizers/qwen2.5"))
    read_set = read(str(shared / "data/gsm8k-verl/train.parquet"), tokenizer, length=1024)
    lengths = [len(p.ids) for p in read_set.prompts]
    assert (len(lengths), min(lengths), max(lengths), read_set.overlong) == (7473, 56, 256, 0)
    assert np.mean(lengths) == pytest.approx(103.647, abs=1e-3)
    first = read_set.prompts[0]
    whole = tokenizer.apply_chat_template(first.messages, add_generation_prompt=True, return_dict=False)
    assert first.ids.tolist() == whole


@pytest.mark.parametrize("filter_overlong", [True, False])
def test_a_line_of_ten_megabytes_is_left_out_or_refused_at_once(tmp_path, characters, filter_overlong):
    """A word of that length takes a tokenizer minutes; that it is too long is known from its first characters."""
    rows = [{"prompt": text, "ground_truth": "1", "data_source": "exact"} for text in ("12", "1" * 10_000_000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    began = time.monotonic()
    if filter_overlong:
        found = read(str(tmp_path / "a.jsonl"), characters)
        assert len(found.prompts) == 1 and found.overlong == 1
    else:
        with pytest.raises(UserError, match=r"a\.jsonl, line 2: the prompt has .* tokens or more"):
            read(str(tmp_path / "a.jsonl"), characters, keep=False)
    assert time.monotonic() - began < 20


def test_where_long_prompts_are_cut_one_that_takes_minutes_is_announced(tmp_path, characters, capsys, monkeypatch):
    monkeypatch.setattr("jppo.data.tokenizer.LONG", 5)
    rows = [{"prompt": text, "ground_truth": "1", "data_source": "exact"} for text in ("12", "121212")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read(str(tmp_path / "a.jsonl"), characters, keep=False, truncation="left")
    (said,) = capsys.readouterr().err.splitlines()
    assert "a.jsonl, line 2: a text of 6 characters" in said


def test_columns_may_have_other_names(tmp_path, characters):
    row = {"question": "1+2=", "right": "3", "task": "arithmetic", "prompt": "not this", "level": 2}
    columns = {"prompt": "question", "ground_truth": "right", "data_source": "task"}
    files = write(tmp_path, row, row | {"question": "1+1="})
    first, second = read(files, characters, columns=columns).prompts
    assert (first.messages, first.data_source, first.ground_truth) == ("1+2=", "arithmetic", "3")
    assert first.extra == {"level": 2, "right": "3"}
    assert second.messages == "1+1=" and second.uid == "d:2"
    keys = {"question": "data.prompt_key", "right": "data.ground_truth_key", "task": "data.reward_fn_key"}
    for column, setting in keys.items():
        lacking = write(tmp_path, {k: v for k, v in row.items() if k != column})
        with pytest.raises(UserError, match=rf"line 1 has no '{column}', which {setting} names; its columns are"):
            read(lacking, characters, columns=columns)


def test_the_first_rows_of_training(tmp_path, characters):
    files = write(tmp_path, GOOD, GOOD | {"prompt": "1+1="}, GOOD)
    assert len(read(files, characters, max_samples=2).prompts) == 2
    with pytest.raises(UserError, match=r"data\.train_max_samples=0 must be -1"):
        read(files, characters, max_samples=0)
