"""verl's published numbers by scripts/check_golden.py, which must also be able to say no."""

import json

import numpy as np
import pytest

from tests import make

FOLDERS = ("advantage", "aggregate", "correction", "entropy", "kl", "policy_loss", "value_loss")


@pytest.fixture(scope="module")
def script():
    return make.script("scripts/check_golden.py")


@pytest.fixture
def write(tmp_path):
    """(name, settings, arrays) -> the folder, with one more case."""

    def one(name, meta, **arrays):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, meta=json.dumps(meta), **arrays)
        return tmp_path

    return one


@pytest.fixture
def golden(shared, write):
    """(name, change of settings and arrays) -> a folder with a published case, changed."""

    def copy(name, change=lambda meta, arrays: None):
        with np.load(shared / "golden" / name) as z:
            arrays = {k: z[k] for k in z.files}
        meta = json.loads(str(arrays.pop("meta")))
        change(meta, arrays)
        return write(name, meta, **arrays)

    return copy


def grpo(**changes):
    """A case worked by hand: a group of 1 and 3 whose std is √2, and one of its own."""
    scores = np.array([[0.0, 1.0], [0.0, 3.0], [5.0, 0.0]])
    expected = np.array([[-1.0, -1.0], [1.0, 1.0], [5.0, 0.0]])
    arrays = dict(in_rewards=scores, in_mask=np.array([[1.0, 1], [1, 1], [1, 0]]), in_index=np.array([7, 7, -2]))
    return dict(meta=dict(fn="grpo", norm_adv_by_std=False), out_advantages=expected, **arrays) | changes


@pytest.mark.parametrize("folder", FOLDERS)
def test_published_numbers(script, shared, folder):
    cases = script.read(shared / "golden" / folder)
    assert cases and tuple(sorted(p.name for p in (shared / "golden").iterdir())) == FOLDERS
    assert not {case.name: faults for case in cases if (faults := script.check(case)[0])}


def test_what_passes_is_counted_by_folder(script, write, capsys):
    write("a/x.npz", **grpo())
    folder = write("a/deeper/y.npz", **grpo())
    assert script.main([str(folder), "--verbose"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "2 passed, 0 failed"
    assert [line.split() for line in out[-3:-1]] == [["a/deeper", "1", "0"], ["a", "1", "0"]]
    assert out[0].startswith("passed a/deeper/y.npz: ") and "in float64" in out[0] and "in float32" in out[0]


@pytest.mark.parametrize("step,precisions", [(1e-3, ("float64", "float32")), (1e-5, ("float64",)), (1e-8, ())])
def test_a_number_that_is_off(script, write, capsys, step, precisions):
    expected = grpo()["out_advantages"] + step * np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    folder = write("case.npz", **grpo(out_advantages=expected))
    assert script.main([str(folder)]) == int(bool(precisions))
    *lines, _, _, last = capsys.readouterr().out.splitlines()
    assert last == ("0 passed, 1 failed" if precisions else "1 passed, 0 failed")
    assert [line.split(": relative")[0] for line in lines] == [f"FAILED case.npz: advantages, {p}" for p in precisions]


def test_what_stands_behind_the_mask_of_an_expected_output_means_nothing(script, write):
    expected = grpo()["out_advantages"] + np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 9.0]])
    assert script.main([str(write("case.npz", **grpo(out_advantages=expected)))]) == 0


def test_what_jppo_leaves_behind_its_mask_is_seen(script, write, monkeypatch):
    monkeypatch.setattr(script.masked, "at_kept", lambda x, sequence, mask: np.asarray(x)[sequence])
    assert script.main([str(write("case.npz", **grpo()))]) == 1


@pytest.mark.parametrize(
    "name,key",
    [
        ("policy_loss/vanilla-1-gaps-0.npz", "out_loss"),
        ("policy_loss/gspo-7-plain-1.npz", "out_grad"),
        ("policy_loss/vanilla-5-gaps-0.npz", "actor/pg_clipfrac_lower"),
        ("policy_loss/cispo-9-gaps-0.npz", "actor/ppo_kl"),
        ("value_loss/token-mean-c0.2-gaps-0.npz", "clipfrac"),
        ("correction/rs-token_k1-gaps-0.npz", "out_mask"),
        ("correction/is-sequence-1.2-1-gaps-0.npz", "out_weights"),
        ("kl/adaptive_controller-0.npz", "out_coef"),
        ("entropy/entropy-gaps-0.npz", "out_loss"),
    ],
)
def test_every_kind_of_number_is_compared(script, golden, capsys, name, key):
    """One number of a published case, off by 1 %, is a failure that names it, in both precisions."""

    def change(meta, arrays):
        if key in arrays:
            flat = arrays[key].reshape(-1)
            flat[np.argmax(np.abs(flat))] *= 1.01
        else:
            (meta if key in meta else meta["metrics"])[key] *= 1.01

    assert script.main([str(golden(name))]) == 0
    assert script.main([str(golden(name, change))]) == 1
    *lines, _, _, last = capsys.readouterr().out.splitlines()
    assert last == "0 passed, 1 failed"
    said = f"FAILED {name}: {key.removeprefix('out_')}"
    assert [line.split(": relative")[0] for line in lines[-2:]] == [f"{said}, float64", f"{said}, float32"]


@pytest.mark.parametrize(
    "name,settings",
    [
        ("advantage/gae-gaps-g0.99-l0.95-0.npz", {"gamma": 0.9}),
        ("advantage/gae-gaps-g0.99-l0.95-0.npz", {"lam": 0.5}),
        ("advantage/grpo-gaps-std1-0.npz", {"norm_adv_by_std": False}),
        ("aggregate/seq-mean-token-sum-norm-scaled-gaps-0.npz", {"loss_scale_factor": 99}),
        ("aggregate/token-mean-full-gaps-0.npz", {"mode": "seq-mean-token-mean"}),
        ("policy_loss/vanilla-1-gaps-0.npz", {"clip_ratio_high": 0.1}),
        ("policy_loss/vanilla-5-gaps-0.npz", {"clip_ratio_c": 1.2}),
        ("policy_loss/sapo-11-gaps-0.npz", {"tau_neg": 2.0}),
        ("value_loss/token-mean-c0.2-gaps-0.npz", {"cliprange_value": 0.3}),
        ("correction/rs-token_k1-gaps-0.npz", {"threshold": 1.1}),
        ("correction/is-token-1.2-0-gaps-0.npz", {"level": "sequence"}),
        ("correction/is-token-1.2-1-gaps-0.npz", {"batch_normalize": False}),
        ("kl/k3-gaps-0.npz", {"kind": "k3+"}),
        ("kl/adaptive_controller-0.npz", {"horizon": 9000}),
    ],
)
def test_every_setting_is_read(script, golden, name, settings):
    assert script.main([str(golden(name, lambda meta, arrays: meta.update(settings)))]) == 1


@pytest.mark.parametrize(
    "name,meta,said",
    [
        ("grpo", dict(fn="grppo"), "fn='grppo' is not known; it is one of gae, "),
        ("none", dict(), "fn=None is not known"),
        ("setting", dict(fn="grpo"), "norm_adv_by_std"),
        (
            "extra",
            dict(fn="grpo", norm_adv_by_std=False, metrics={"actor/new": 1.0}),
            "no such output of grpo: actor/new",
        ),
    ],
)
def test_what_is_not_known_fails_and_says_why(script, write, capsys, name, meta, said):
    folder = write(f"{name}.npz", **grpo(meta=meta))
    write("right.npz", **grpo())
    assert script.main([str(folder)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"FAILED {name}.npz: float64: ") and said in out[0]
    assert out[-1] == "1 passed, 1 failed"


@pytest.mark.parametrize(
    "name,settings,said",
    [
        ("aggregate/token-mean-full-gaps-0.npz", {"mode": "mean"}, "token-mean"),
        ("kl/k3-gaps-0.npz", {"kind": "k4"}, "k4"),
        ("correction/rs-token_k1-gaps-0.npz", {"rs": "token_k4"}, "token_k1"),
        ("correction/rs-token_k1-gaps-0.npz", {"threshold": "wide"}, "wide"),
    ],
)
def test_an_unknown_mode_fails_and_says_why(script, golden, capsys, name, settings, said):
    assert script.main([str(golden(name, lambda meta, arrays: meta.update(settings)))]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert len(lines) == 2 and all(said in line for line in lines)


def test_a_case_where_verl_is_wrong_counts_as_failed(script, write, monkeypatch, capsys):
    monkeypatch.setitem(script.KNOWN, "case.npz", "it counts one twice")
    assert script.main([str(write("case.npz", **grpo()))]) == 1
    assert "FAILED case.npz: verl is wrong: it counts one twice" in capsys.readouterr().out


def flipped(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


DAMAGE = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "a bit flipped": flipped,
    "without meta": lambda file: np.savez(file, in_x=np.zeros(2), out_x=np.zeros(2)),
    "without outputs": lambda file: np.savez(file, meta="{}", in_x=np.zeros(2)),
    "not settings": lambda file: np.savez(file, meta="[1]", in_x=np.zeros(2), out_x=np.zeros(2)),
    "pickled": lambda file: np.savez(file, meta="{}", out_x=np.array([object()])),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_one_line_and_exit_2(script, write, capsys, damage):
    folder = write("a/case.npz", **grpo())
    damage(folder / "a/case.npz")
    assert script.main([str(folder)]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and "a/case.npz" in err


@pytest.mark.parametrize("name", ["", "none", "file"])
def test_no_cases_is_one_line_and_exit_2(script, tmp_path, capsys, name):
    (tmp_path / "file").touch()
    assert script.main([str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and str(tmp_path) in err
