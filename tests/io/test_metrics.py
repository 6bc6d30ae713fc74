import io
import json
import math
import struct

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from tensorboardX.proto.event_pb2 import Event

from jppo.io.metrics import Logger, read_metrics, write_samples


def console(terminal=False):
    return rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=120)


def logger(tmp_path, **kw):
    return Logger(tmp_path, total_steps=5, console=console(), **kw)


def test_each_step_is_on_disk_at_once(tmp_path):
    with logger(tmp_path) as log:
        log.log(1, {"a": jnp.float32(0.5), "n": 3, "np": np.float64(2.0)})
        assert read_metrics(tmp_path) == [{"step": 1, "a": 0.5, "n": 3, "np": 2.0}]


def test_non_finite_numbers_leave_valid_json(tmp_path):
    with logger(tmp_path) as log:
        log.log(1, {"loss": math.nan, "ratio": jnp.inf, "ok": 0.0})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {
        "step": 1,
        "loss": None,
        "ratio": None,
        "ok": 0.0,
        "nonfinite": {"loss": "nan", "ratio": "inf"},
    }


def test_a_metric_that_is_no_number_is_named(tmp_path):
    with logger(tmp_path) as log, pytest.raises(TypeError, match="'a'"):
        log.log(1, {"a": [1, 2]})


def test_a_resumed_run_counts_no_step_twice(tmp_path):
    with logger(tmp_path) as log:
        for step in (0, 1, 2, 3):
            log.log(step, {"a": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a"')  # killed in the middle of a line
    with logger(tmp_path, resumed_step=2) as log:
        log.log(3, {"a": 30})
    assert [(m["step"], m["a"]) for m in read_metrics(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_a_new_run_starts_its_file_anew(tmp_path):
    with logger(tmp_path) as log:
        log.log(1, {"a": 1})
    with logger(tmp_path) as log:
        log.log(1, {"a": 2})
    assert [m["a"] for m in read_metrics(tmp_path)] == [2]


def events(path):
    data, at = path.read_bytes(), 0
    while at < len(data):  # length u64, its crc u32, the event, its crc u32
        (length,) = struct.unpack_from("<Q", data, at)
        yield Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length


def test_tensorboard_has_the_finite_scalars_and_forgets_what_is_done_again(tmp_path):
    with logger(tmp_path, resumed_step=2) as log:
        log.log(3, {"a": 1.5, "b": math.nan})
    [path] = (tmp_path / "tensorboard").iterdir()
    read = list(events(path))
    scalars = [(e.step, v.tag, v.simple_value) for e in read for v in e.summary.value]
    assert scalars == [(3, "a", 1.5)]
    assert [e.step for e in read if e.HasField("session_log")] == [3]


def test_tensorboard_shows_samples_as_they_are(tmp_path):
    row = {"prompt": "a|b\n<i>*1*</i>", "response": "\\boxed{2}", "ground_truth": "3", "score": None, "error": "e_e"}
    with logger(tmp_path) as log:
        log.generations(4, [row | {"prompt": [{"role": "user", "content": "x"}], "score": 0.5, "error": None}, row])
        log.generations(5, [])
    [path] = (tmp_path / "tensorboard").iterdir()
    [(step, text)] = [(e.step, v.tensor.string_val[0].decode()) for e in events(path) for v in e.summary.value]
    head, rule, first, second = text.splitlines()
    assert step == 4 and head == "| prompt | response | ground_truth | score | error |" and rule.count("---") == 5
    assert first.endswith(r"| \\boxed\{2\} | 3 | 0\.5 |  |") and '"content": "x"' in first
    assert second == r"| a\|b<br>&lt;i&gt;\*1\*&lt;/i&gt; | \\boxed\{2\} | 3 |  | e\_e |"


def test_samples_are_one_json_object_a_line(tmp_path):
    rows = [{"prompt": "naïve", "score": 1.0, "parts": {"exact": math.nan}}, {"prompt": [{"role": "user"}]}]
    path = write_samples(tmp_path, "step_7", rows)
    assert path == tmp_path / "samples/step_7.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"prompt": "naïve", "score": 1.0, "parts": {"exact": "nan"}} and second == rows[1]
