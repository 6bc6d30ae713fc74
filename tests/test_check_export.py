"""scripts/check_export.py says yes to a right export and can say no; the real vLLM in it is tested elsewhere."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from examples.arithmetic import write_model
from jppo.models import decoder, hf, hf_write

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "check_export.py"
PROMPTS = ["47+85=", "1+1=", "99+99=", "2"]


@pytest.fixture
def script():
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("check_export", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A random model as a run leaves it: hf/, and data/test.jsonl beside it."""
    tmp_path = tmp_path_factory.mktemp("run")
    write_model(tmp_path / "start")
    _, cfg = hf.read_config(tmp_path / "start")
    params = decoder.init_params(cfg, jax.random.key(0), head="lm", param_dtype=jnp.float32)
    params = jax.tree.map(lambda x: 8 * x, params)  # answers that differ from prompt to prompt, and end
    hf_write.save(tmp_path / "hf", params, cfg, source=tmp_path / "start", dtype="float32")
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS]
    (tmp_path / "data" / "test.jsonl").write_text("".join(lines))
    return tmp_path / "hf"


def test_agreement_and_difference(script, exported, monkeypatch, capsys):
    def right(args, params, cfg, prompts, end):
        answers = script.by_transformers(args.hf_dir, prompts, max_tokens=args.max_tokens, end=end)
        assert len(set(map(tuple, answers))) > 1
        return answers

    def wrong(*args):
        answers = right(*args)
        answers[2][1] = 5 if answers[2][1] != 5 else 6
        return answers

    monkeypatch.setattr(script, "by_vllm", right)
    assert script.main([str(exported), "--max-tokens=12"]) == 0
    out = capsys.readouterr().out
    assert out.count("agree on 4 of 4 answers") == 3 and "first at" not in out
    monkeypatch.setattr(script, "by_vllm", wrong)
    assert script.main([str(exported), "--max-tokens=12", "--n=3"]) == 1
    out = capsys.readouterr().out
    assert out.count("agree on 2 of 3 answers") == 2 and out.count("agree on 3 of 3 answers") == 1
    assert out.count(f"first at token 1 of the answer to {PROMPTS[2]!r}") == 2


def test_an_answer_that_goes_on_differs_at_its_end(script):
    assert script.first_difference([[1, 2], [3]], [[1, 2], [3]]) is None
    assert script.first_difference([[1, 2], [3]], [[1, 2], [3, 4]]) == (1, 1)
    assert script.first_difference([[1, 2, 9], [3]], [[1, 5, 9], []]) == (0, 1)


@pytest.mark.parametrize("wrong", [["--prompts=no.jsonl"], ["--n=0"]])
def test_what_cannot_be_read_is_one_line(script, exported, capsys, wrong):
    assert script.main([str(exported), *wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
