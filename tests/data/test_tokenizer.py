import json
import random
import shutil
import subprocess
import sys

import pytest

from jppo.data.tokenizer import (
    announce_long,
    decode,
    decode_stream,
    encode_all,
    end_token_ids,
    load_tokenizer,
    make_decoders,
    pieces,
    tokenize,
)
from jppo.errors import UserError
from tests.make import bytes_as_text


def test_transformers_does_not_tell_that_there_is_no_torch():
    program = "import sys; sys.modules['torch'] = None; from jppo.data import tokenizer; import transformers"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_end_tokens_of_all_three_files_each_once(tmp_path, characters):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 6}))
    assert end_token_ids(str(tmp_path), characters) == (5, 6, 1)


def test_end_token_zero_counts(tmp_path, characters):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert end_token_ids(str(tmp_path), characters) == (0, 1)


def test_no_end_token_is_an_error(tmp_path, characters):
    characters.eos_token = None
    with pytest.raises(UserError, match="eos_token_id"):
        end_token_ids(str(tmp_path), characters)


def test_decode_leaves_special_tokens_out(characters):
    assert decode(characters, [3, 5, 4, 1, 0]) == "132"


@pytest.mark.parametrize("wide", [False, True])
def test_a_truncation_of_the_tokenizers_file_cuts_no_text(characters, wide):
    whole = tokenize(characters, "12+34=408")
    assert len(whole) == 9 and characters.decode(whole) == "12+34=408"
    backend = characters.backend_tokenizer
    backend.enable_padding(length=20) if wide else backend.enable_truncation(3)
    assert tokenize(characters, "12+34=408") == whole
    assert backend.truncation is None and backend.padding is None


def test_the_fast_decoders_return_the_text_of_the_tokenizer(shared, characters):
    rng, byte_level = random.Random(0), load_tokenizer(str(shared / "tokenizers/qwen2.5"))
    byte_level.add_tokens(["two words", "\N{SNOWMAN}"])
    vocab = byte_level.get_vocab()
    # bytes of incomplete characters, special and added tokens, and ids without a token
    odd = [vocab[c] for c in "\u00e2\u013a\u0125\u00f0\u0141"] + list(byte_level.get_added_vocab().values()) + [10**6]
    for tokenizer, some in ((byte_level, odd), (characters, [0, 1, 3, 4, 5])):
        decoders = make_decoders(tokenizer)
        for _ in range(2000):
            ids = [rng.choice(some) if rng.random() < 0.5 else rng.randrange(len(tokenizer)) for _ in range(9)]
            expected = [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False)]
            assert [decoder(ids) for decoder in decoders] == expected


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "model.path is empty"),
        ("/no/such/directory", "no directory /no/such/directory"),
        ("Some/Hub-Name", "tokenizer.json of 'Some/Hub-Name' was not found"),
    ],
)
def test_what_is_not_there_is_named(path, said):
    with pytest.raises(UserError, match=said):
        load_tokenizer(path)


def test_a_directory_without_a_tokenizer_is_an_error(shared):
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_tokenizer(str(shared / "models/qwen2.5-0.5b-config"))


def test_a_cut_tokenizer_file_is_an_error(tmp_path, character_model):
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((character_model / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("wrong", [999999, 7, -1, "x", 1.0, True, [1, "x"], {"a": 1}])
def test_an_end_token_that_is_none_is_refused(tmp_path, characters, wrong):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(
        UserError, match=r"eos_token_id=.* of generation_config\.json must be token ids, .*vocab_size=7"
    ):
        end_token_ids(str(tmp_path), characters)


@pytest.mark.parametrize("text", ["", '{"eos_token_id": ', "[]", "3", "\0\0", "[" * 100_000])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_cut_config_beside_the_tokenizer_is_one_line(tmp_path, characters, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"{name} (is not valid JSON|must be a JSON object)") as e:
        end_token_ids(str(tmp_path), characters)
    assert "\n" not in str(e.value)


def test_a_limit_that_is_no_number_is_one_line(tmp_path, character_model):
    shutil.copytree(character_model, tmp_path / "model")
    file = tmp_path / "model/tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": {"a": 1}}))
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(str(tmp_path / "model"))


def test_a_text_that_takes_minutes_is_announced(capsys):
    announce_long("train.jsonl, line 3", "a" * 1000, "b")
    assert capsys.readouterr().err == ""
    announce_long("train.jsonl, line 3", "a", "b" * 10_000_000)
    assert capsys.readouterr().err.startswith("train.jsonl, line 3: a text of 10,000,000 characters is tokenised")


def test_tokens_within_the_limit_are_those_of_the_whole_text(characters, monkeypatch):
    monkeypatch.setattr("jppo.data.tokenizer.CUT_FROM", 10)
    texts = ["1+1=", "12" * 500, "é" * 3, " " * 2000]
    whole = characters(texts, verbose=False)["input_ids"]
    longest = max(map(len, characters.get_vocab()))
    for most in (1, 4, 100, 1000, 5000):
        found = encode_all(characters, texts, max_length=most)
        for ids, all_ids in zip(found, whole, strict=True):
            assert ids == all_ids if len(all_ids) <= most else most < len(ids) <= max(10, most * longest + 1)


def test_pieces_are_whole_characters():
    text = "né €5"
    answer = [[byte] for byte in text.encode()]
    assert list(decode_stream(answer, bytes_as_text)) == ["n", "é", " ", "€", "5"]
    cut = [list(text.encode())[:5]]  # in the middle of a character
    assert list(decode_stream(cut, bytes_as_text)) == ["né ", "\N{REPLACEMENT CHARACTER}"]
    assert list(decode_stream([], bytes_as_text)) == []


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids, **_):
        return bytes_as_text(ids)


def test_a_piece_of_text_stands_at_the_last_token_of_its_character():
    assert pieces(Bytes(), list("né €5".encode())) == ["n", "", "é", " ", "", "", "€", "5"]
    half = "\N{REPLACEMENT CHARACTER}"
    assert pieces(Bytes(), [0x80] * 40 + [*b"a"]) == [""] * 31 + [half * 32] + [""] * 8 + [half * 8 + "a"]  # no text


def test_an_answer_goes_on_from_what_was_before():
    def strip(ids):  # as tokenizers that mark the beginning of words do: the text has no space at its beginning
        return bytes_as_text(ids).lstrip(" ")

    assert list(decode_stream([[*b" a"], [*b" b"]], strip, before=[*b"x"])) == [" a", " b"]
    assert list(decode_stream([[*b" a"], [*b" b"]], strip)) == ["a", " b"]
