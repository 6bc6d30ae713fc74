import json

import pytest

from jppo.config import UserError
from jppo.data.tokenizer import decode, end_token_ids, load_tokenizer


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


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "model.path is empty"),
        ("/no/such/directory", "no directory /no/such/directory"),
        ("Some/Hub-Name", "tokenizer.json of 'Some/Hub-Name' was sought"),
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
