"""Exported directories: what transformers and peft make of them, the card beside them, and what is refused."""

import base64
import http.server
import json
import pathlib
import shutil
import threading

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import constants

from jppo import __version__, export, settings, sft, train
from jppo.models import hf
from tests.make import logits, one_line

TOKENS = np.array([[3, 5, 12, 7, 2, 13]])  # '13+50=' by the quickstart's tokenizer


@pytest.fixture(scope="module")
def made():
    """The runs of this module, each made once."""
    return {}


@pytest.fixture
def full(small_run, made):
    """A run whose checkpoints have their models beside them; they differ by much, and the first is called the best."""
    if "full" not in made:
        small_run.actor.lr, small_run.trainer.save_contents = 1e-2, "model,optimizer,extra,hf_model"
        small_run.critic.value_head_std = 0.2  # most scores are 0: a critic of zeros would leave the policy as it is
        settings.check(small_run)
        train.train(small_run)
        run = made["full"] = pathlib.Path(small_run.trainer.run_dir)
        best = {"step": 1, "metric": "val/score", "value": 0.0}
        (run / "checkpoints/best.json").write_text(json.dumps(best))
    return made["full"]


@pytest.fixture
def adapted(full, small_run, made):
    """A run that learned adapters beside the model of the other."""
    if "adapted" not in made:
        small_run.model.path, small_run.model.init = str(full / "hf"), "pretrained"
        small_run.trainer.run_dir += "-adapted"  # the folder of one test may have both
        small_run.model.lora_rank, small_run.actor.lr, small_run.critic.value_head_std = 4, 1e-1, 0.2
        settings.check(small_run)
        train.train(small_run)
        made["adapted"] = pathlib.Path(small_run.trainer.run_dir)
    return made["adapted"]


def torch_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.float().numpy()


def by_transformers(path):
    return torch_logits(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


def by_jppo(path):
    _, cfg = hf.read_config(path)
    return logits(cfg, hf.load_params(path, cfg, head="lm", param_dtype=jnp.float32), TOKENS.astype(np.int32))


def refused(capsys, *words):
    return one_line(capsys, export.main, *words)


def test_transformers_loads_the_newest_the_best_and_any_step(full, tmp_path, capsys):
    export.main([str(full), "--out", str(tmp_path / "last")])
    assert capsys.readouterr().out.splitlines() == [
        f"from              {full / 'checkpoints/2'}",
        f"model             {tmp_path / 'last'}, float32",
    ]
    export.main([str(full), "--step", "1", "--out", str(tmp_path / "first")])
    export.main([str(full), "--best", "--out", str(tmp_path / "best")])
    export.main([str(full / "checkpoints/1"), "--out", str(tmp_path / "by/name")])
    last, first = by_transformers(tmp_path / "last"), by_transformers(tmp_path / "first")
    assert np.array_equal(last, by_transformers(full / "hf"))
    assert np.array_equal(first, by_transformers(full / "checkpoints/1/hf"))
    assert np.abs(last - first).max() > 1e-2
    for same in ("best", "by/name"):
        assert np.array_equal(first, by_transformers(tmp_path / same))
    np.testing.assert_allclose(by_jppo(tmp_path / "last"), last, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "last")
    assert tokenizer("13+50=")["input_ids"] == TOKENS[0].tolist()
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "last").eos_token_id == 1


def test_a_narrow_dtype_is_the_stored_one(full, tmp_path):
    export.main([str(full), "--dtype", "bfloat16", "--out", str(tmp_path / "out")])
    narrow = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert narrow.dtype == torch.bfloat16
    wide = transformers.AutoModelForCausalLM.from_pretrained(full / "hf", dtype=torch.float32).to(torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(narrow.parameters(), wide.parameters(), strict=True))


def test_the_card_says_what_the_run_did(full, tmp_path):
    export.main([str(full), "--step", "1", "--out", str(tmp_path / "adder")])
    text = (tmp_path / "adder/README.md").read_text()
    config = json.loads((full / "config.json").read_text())
    scores = {m["step"]: m["val/score"] for m in map(json.loads, (full / "metrics.jsonl").read_text().splitlines())}
    assert "# adder\n" in text and "trained by PPO with jppo after step 1." in text
    assert f"| `val/score` | {scores[0]:.4f} | {scores[1]:.4f} |" in text
    assert "| `actor.lr` | 0.01 |" in text and "- training data: train.jsonl" in text and "- base model: model" in text
    assert f"exported by: jppo {__version__}" in text
    assert config["data"]["train_files"] not in text and "lora" not in text  # no path of this machine, nothing off


def test_adapters_alone_and_merged_are_one_model(adapted, full, tmp_path):
    import peft

    export.main([str(adapted), "--out", str(tmp_path / "adapter")])
    export.main([str(adapted), "--merge_lora", "--out", str(tmp_path / "merged")])
    assert not list((tmp_path / "adapter").glob("model*"))
    assert "LoRA adapters" in (tmp_path / "adapter/README.md").read_text()
    base = transformers.AutoModelForCausalLM.from_pretrained(full / "hf", dtype=torch.float32)
    before = torch_logits(base)
    applied = torch_logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    merged = by_transformers(tmp_path / "merged")
    np.testing.assert_allclose(applied, merged, atol=2e-5)
    assert np.abs(merged - before).max() > 1e-2
    assert np.array_equal(merged, by_transformers(adapted / "hf"))


def test_a_run_without_checkpoints_has_its_last_model(adapted, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(adapted, run, ignore=shutil.ignore_patterns("checkpoints"))
    assert "is for a checkpoint, and" in refused(capsys, run, "--base", adapted, "--out", tmp_path / "adapter")
    export.main([str(run), "--out", str(tmp_path / "adapter")])
    export.main([str(run), "--merge_lora", "--dtype", "float32", "--out", str(tmp_path / "merged")])
    for out, there in (("adapter/adapter_model", "adapter/adapter_model"), ("merged/model", "hf/model")):
        same = (run / f"{there}.safetensors").read_bytes()
        assert (tmp_path / f"{out}.safetensors").read_bytes() == same
    assert "after step 2." in (tmp_path / "merged/README.md").read_text()


def test_a_fine_tuned_model_is_exported(full, tmp_path):
    (tmp_path / "sft.jsonl").write_text('{"prompt": "1+2=", "response": "3"}\n' * 4)
    c = settings.sft_default()
    c.model.path, c.trainer.run_dir = str(full / "hf"), str(tmp_path / "tuned")
    c.data.train_files = str(tmp_path / "sft.jsonl")
    c.data.train_batch_size, c.data.max_prompt_length, c.data.max_response_length = 4, 8, 8
    c.trainer.total_training_steps = 2
    settings.check(c)
    sft.train(c)
    export.main([str(tmp_path / "tuned"), "--out", str(tmp_path / "out")])
    assert np.array_equal(by_transformers(tmp_path / "out"), by_transformers(tmp_path / "tuned/hf"))
    text = (tmp_path / "out/README.md").read_text()
    assert "supervised fine-tuning" in text and "`optim.lr`" in text
    assert "algorithm" not in text and "## Scores" not in text


def test_what_cannot_be_exported_is_one_line(full, tmp_path, capsys):
    out = ("--out", tmp_path / "out")
    assert "no such folder" in refused(capsys, tmp_path / "nowhere", *out)
    assert "no such folder" in refused(capsys, full / "config.json", *out)
    (tmp_path / "empty").mkdir()
    assert "neither checkpoints nor hf/" in refused(capsys, tmp_path / "empty", *out)
    assert "--step=7" in refused(capsys, full, "--step", 7, *out) and "1, 2" in refused(capsys, full, "--step", 7, *out)
    assert "use one of them" in refused(capsys, full, "--step", 1, "--best", *out)
    assert "is one checkpoint" in refused(capsys, full / "checkpoints/1", "--best", *out)
    assert "best.json" in refused(capsys, tmp_path / "empty", "--best", *out)
    assert "is a file" in refused(capsys, full, "--out", full / "config.json")
    assert "is not empty" in refused(capsys, full, "--out", full / "hf")
    assert "cannot be written" in refused(capsys, full, "--out", full / "config.json/below")
    assert "OWNER/NAME" in refused(capsys, full, "--push", "a b", *out)
    assert "HF_HUB_OFFLINE" in refused(capsys, full, "--push", "me/mine", *out)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_cut_or_damaged_is_not_exported(full, tmp_path, capsys):
    broken, half = tmp_path / "checkpoints/1", tmp_path / "checkpoints/2"
    shutil.copytree(full / "checkpoints/1", broken)
    for file in (p for p in broken.rglob("*") if "/d/" in str(p)):
        file.write_bytes(bytes(byte ^ 0x55 for byte in file.read_bytes()))
    shutil.copytree(full / "checkpoints/2", half)
    shutil.rmtree(half / "about")
    out, before = tmp_path / "new/out", sorted(tmp_path.iterdir())
    assert "no readable checkpoint" in refused(capsys, tmp_path, "--out", out)  # the newest is not passed over
    said = refused(capsys, broken, "--out", out)
    assert str(broken) in said and ("damaged" in said or "no readable" in said)
    unfinished = tmp_path / "checkpoints/3.orbax-checkpoint-tmp"
    unfinished.mkdir()
    assert "no readable checkpoint" in refused(capsys, unfinished, "--out", out)
    assert sorted(tmp_path.iterdir()) == before


def test_what_the_card_lacks_is_said(full, tmp_path, capsys):
    alone, run = tmp_path / "alone", tmp_path / "run"
    shutil.copytree(full / "checkpoints/2", alone)
    export.main([str(alone), "--out", str(tmp_path / "a")])
    assert "scores: the checkpoint is not in a run folder" in capsys.readouterr().out
    assert "| `actor.lr` | 0.01 |" in (tmp_path / "a/README.md").read_text()
    shutil.copytree(full / "hf", run / "hf")
    (run / "config.json").write_text('{"model": {')
    (run / "metrics.jsonl").write_text('{"step": 1, "val/score": 0.25}\n{"st\n7\n')
    export.main([str(run), "--out", str(tmp_path / "b")])
    said = capsys.readouterr().out
    assert "no readable config.json" in said and "2 of 3 lines cannot be read" in said
    assert "| `val/score` | 0.2500 | 0.2500 |" in (tmp_path / "b/README.md").read_text()


def test_a_base_that_is_gone_or_another_is_said(adapted, tiny_model, tmp_path, capsys):
    step, out = adapted / "checkpoints/2", tmp_path / "out"
    gone = refused(capsys, step, "--base", tmp_path / "gone", "--out", out)
    assert "is not a directory" in gone and "--base DIR" in gone
    other = refused(capsys, step, "--merge_lora", "--base", adapted / "hf", "--out", out)
    assert "differ from those that were frozen in training" in other
    assert "does not fit" in refused(capsys, step, "--base", tiny_model, "--out", out)
    assert "add --merge_lora" in refused(capsys, step, "--dtype", "bfloat16", "--out", out)
    assert not out.exists()


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's interface as an upload of small files needs."""

    def answer(self, found, status=200):
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        there = self.server.there
        if "/tree/" in self.path:
            self.answer([{"type": "file", "path": name, "size": 1, "oid": "0"} for name in there])
        else:
            siblings = [{"rfilename": name} for name in there]
            self.answer({"id": "me/adder", "modelId": "me/adder", "sha": "0" * 40, "siblings": siblings, "tags": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers["Authorization"]))
        if self.path == "/api/repos/create":
            self.server.made = json.loads(body)
            self.answer({"url": f"{constants.ENDPOINT}/me/adder", "name": "me/adder", "id": "me/adder"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            sent = [line["value"] for line in lines if line["key"] == "file"]
            self.server.sent = {f["path"]: base64.b64decode(f["content"]) for f in sent}
            url = f"{constants.ENDPOINT}/me/adder/commit/0"
            self.answer({"commitUrl": url, "commitOid": "0" * 40, "success": True})

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A server on this machine in the place of the hub, and a login."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.there, server.sent, server.made = [], [".gitattributes"], {}, None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    server.server_close()


def test_a_push_sends_every_file_to_a_private_repository(full, hub, tmp_path, capsys):
    export.main([str(full), "--out", str(tmp_path / "out"), "--push", "me/adder"])
    assert capsys.readouterr().out.endswith(f"pushed to         {constants.ENDPOINT}/me/adder\n")
    assert hub.made["name"] == "adder"  # and private, in the words of either version of the client
    assert hub.made.get("visibility") == "private" or hub.made.get("private") is True
    assert {token for _, token in hub.asked} == {"Bearer hf_secret"}
    assert hub.sent == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}


def test_a_push_that_cannot_be_is_one_line(full, hub, tmp_path, capsys, monkeypatch):
    hub.there.append("model.safetensors")
    assert "model.safetensors" in refused(capsys, full, "--out", tmp_path / "a", "--push", "me/adder")
    assert not hub.sent
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "refused it" in refused(capsys, full, "--out", tmp_path / "b", "--push", "me/adder")
    assert (tmp_path / "b/model.safetensors").is_file()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    assert "no login" in refused(capsys, full, "--out", tmp_path / "c", "--push", "me/adder")
    assert not (tmp_path / "c").exists()
