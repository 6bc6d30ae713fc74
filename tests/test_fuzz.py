"""Settings, model directories and data files with something odd in them are accepted, or refused by one line.

Each case is made from its number alone. A case is good where it is accepted, or refused by one line (a UserError, exit
code 2), within a minute.
"""

import contextlib
import io
import json
import math
import pathlib
import random
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples import arithmetic
from jppo import settings
from jppo.data.preferences import read_pairs
from jppo.data.prompts import read_prompts
from jppo.data.sft import read_demonstrations
from jppo.data.tokenizer import end_token_ids, load_tokenizer
from jppo.errors import UserError
from jppo.models import hf
from jppo.plugins.reward_models.classifier import read_classifier
from jppo.settings import table

LIMIT_S = 60
DEFAULTS = (settings.default, settings.sft_default, settings.reward_model_default)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.0, -0.5, 1e30, 1e-30, math.inf, -math.inf, math.nan),
    *("", " ", "x", "0", "nan", "a,b", "a=1,a=2", ",", "../x", "/proc/self", "\0", "\ud800", "é\x1b[2J", "x" * 5000),
    *([], [1], [None], ["x"], {}, {"a": 1}, {"role": "user"}, [{"role": "user", "content": "x"}], [[]]),
)


class Slow(BaseException):
    """A case that has not ended in time; no `except Exception` takes it."""


def of_settings(rng: random.Random, folder: pathlib.Path) -> None:
    """One to three settings, as on a command line or as a config file would set them."""
    config = rng.choice(DEFAULTS)()
    names = sorted(table.by_name(config))
    config.model.path, config.data.train_files = "model", "train.jsonl"
    if "val_files" in config.data:
        config.data.val_files = "val.jsonl"
    given = []
    for name in rng.choices(names, k=rng.randint(1, 3)):
        was = table.by_name(config)[name]
        alike = [value for value in ODD if type(value) is type(was)] or list(ODD)  # else the type alone is refused
        given.append(f"--config.{name}={rng.choice(alike) if rng.random() < 0.8 else text(rng)}")
    changed, _ = settings.parse(given, "", config, needs_file=False)
    settings.check(changed)
    settings.dump(changed)


def of_model(rng: random.Random, folder: pathlib.Path) -> None:
    """A model directory of which one or two files are broken."""
    arithmetic.write_model(folder)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = arithmetic.MODEL | shape
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    header = {"model.norm.weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}}
    write_tensors(folder / "model.safetensors", header)
    for _ in range(rng.randint(1, 2)):
        file = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
        if file.suffix == ".safetensors" and rng.random() < 0.7:
            write_tensors(file, changed(rng, header))
        elif file.suffix == ".json" and rng.random() < 0.7:
            with contextlib.suppress(ValueError, RecursionError):  # it is broken already
                file.write_text(json.dumps(changed(rng, json.loads(file.read_text()))))
        else:
            break_bytes(rng, file)
    if rng.random() < 0.2:
        (folder / "model.safetensors").rename(folder / "model.safetensors.index.json")
    hf.read_config(folder)  # first, as every command does
    faults = []
    for look in (read_tokenizer, read_weights):
        try:
            look(folder)
        except UserError as e:
            faults.append(e)
    for fault in faults:
        raise fault


def read_tokenizer(folder: pathlib.Path) -> None:
    """The tokenizer, its end tokens, and the reward model that the directory may be."""
    tokenizer = load_tokenizer(str(folder))
    end_token_ids(str(folder), tokenizer)
    read_classifier(str(folder), tokenizer=tokenizer, max_length=16)


def read_weights(folder: pathlib.Path) -> None:
    """The parameters by the directory's own description."""
    _, cfg = hf.read_config(folder)
    hf.load_params(folder, cfg, head="lm", param_dtype="float32")


def of_data(rng: random.Random, folder: pathlib.Path) -> None:
    """A file of prompts, demonstrations or pairs of which some rows are broken."""
    folder.mkdir()
    kind = rng.choice(("prompts", "demonstrations", "pairs"))
    row: dict[str, Any] = {"prompt": "1+1=", "ground_truth": "2", "data_source": "exact"}
    row = {"prompts": row, "demonstrations": {"prompt": "1+1=", "response": "2"}}.get(
        kind, {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    )
    if rng.random() < 0.3:
        row["prompt"] = [{"role": "user", "content": "1+1="}]
    rows: list[Any] = [dict(row) for _ in range(4)]
    for _ in range(rng.randint(1, 2)):
        i = rng.randrange(4)
        rows[i] = changed(rng, rows[i])
    file = folder / rng.choice(("train.jsonl", "train.jsonl", "train.json", "train.parquet"))
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    if file.suffix == ".parquet":
        with contextlib.suppress(pa.ArrowException, OverflowError, UnicodeError):  # rows that no such file can have
            pq.write_table(pa.Table.from_pylist([one for one in rows if isinstance(one, dict)]), file)
    if rng.random() < 0.3:
        break_bytes(rng, file)
    tokenizer, files = TOKENIZER[0], str(file)
    if kind == "prompts":
        read_prompts(files, tokenizer=tokenizer, max_prompt_length=16, filter_overlong=rng.random() < 0.5)
    elif kind == "demonstrations":
        turns = rng.choice(("last", "all"))
        read_demonstrations(
            files, tokenizer=tokenizer, max_length=32, system_prompt="", custom_cls="", learn_turns=turns
        )
    else:
        read_pairs(
            files,
            encode=lambda prompt, response: tokenizer(f"{prompt}{response}")["input_ids"],
            max_length=32,
            margin=0.0,
            margin_column=rng.choice(("", "gap")),
            system_prompt="",
            custom_cls="",
            tokenizer=tokenizer,
        )


TOKENIZER: list[Any] = []  # the quickstart's, read once
KINDS: tuple[Callable[[random.Random, pathlib.Path], None], ...] = (of_settings, of_model, of_data)


def text(rng: random.Random) -> str:
    """A value as someone might type it."""
    value = rng.choice(ODD)
    return value if isinstance(value, str) else rng.choice((str(value), json.dumps(value)))


def changed(rng: random.Random, value: Any) -> Any:
    """The value with something odd in one place of it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.6:
        i = rng.randrange(len(value))
        return [*value[:i], changed(rng, value[i]), *value[i + 1 :]]
    return rng.choice(ODD)


def break_bytes(rng: random.Random, file: pathlib.Path) -> None:
    """A file that was cut, has NULs or bits that changed, or is of another kind."""
    data = bytearray(file.read_bytes())
    variant = rng.randrange(4)
    if variant == 0:
        data = data[: rng.randrange(len(data) + 1)]
    elif variant == 1:
        data += bytes(rng.randint(1, 100))
    elif variant == 2:
        for _ in range(min(8, len(data))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        data = bytearray(rng.choice((b"", b"[" * 100_000, b"PAR1", b"\xff\xfe", b"null", b"{}\n{}")))
    file.write_bytes(data)


def write_tensors(file: pathlib.Path, header: Any) -> None:
    """A file of safetensors with this header and 128 bytes of data."""
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + bytes(128))


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises Slow where the block takes longer."""

    def late(*_: Any) -> None:
        raise Slow(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judge(number: int, folder: pathlib.Path) -> str:
    """'accepted', 'refused', or what is wrong with how the case ended."""
    rng = random.Random(number)
    try:
        with within(LIMIT_S), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            KINDS[number % len(KINDS)](rng, folder)
    except UserError as e:
        return "refused" if str(e).strip() and "\n" not in str(e) else f"an error of several lines: {e}"
    except SystemExit as e:  # of the command line's own parser
        return "refused" if e.code == 2 else f"exit code {e.code}"
    except BaseException:
        return traceback.format_exc()
    return "accepted"


@pytest.fixture(scope="module", autouse=True)
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "quickstart"
    arithmetic.write_model(folder)
    TOKENIZER.append(load_tokenizer(str(folder)))


def test_three_hundred_cases_are_accepted_or_refused_by_one_line(tmp_path):
    found = [judge(number, tmp_path / str(number)) for number in range(300)]
    assert [one for one in found if one not in ("accepted", "refused")] == []
    for kind in range(3):  # each kind sees both, so that it tries more than the first check
        assert {"accepted", "refused"} <= set(found[kind::3]) or kind == 1


def test_what_is_bad_is_seen(tmp_path, monkeypatch):
    def case(what):
        monkeypatch.setitem(globals(), "KINDS", (what,))
        return judge(0, tmp_path)

    def fails(*_):
        raise KeyError("nobody expects this")

    def tells(*_):
        raise UserError("two\nlines")

    assert "KeyError: 'nobody expects this'" in case(fails)
    assert case(tells) == "an error of several lines: two\nlines"
    monkeypatch.setitem(globals(), "LIMIT_S", 1)
    assert "Slow: not done after 1 s" in case(lambda *_: time.sleep(30))
    assert case(lambda *_: None) == "accepted"
