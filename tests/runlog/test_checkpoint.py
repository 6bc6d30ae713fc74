import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.metadata import array_metadata_store

from jppo.errors import UserError
from jppo.runlog import checkpoint, checkpoint_arrays
from jppo.runlog.checkpoint import Checkpoints
from jppo.runlog.checkpoint_arrays import restore
from jppo.types import TrainState


def sharding(shape, *spec):
    mesh = jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, P(*spec))


def state(step, seed=0):
    """A train state of every kind of leaf: sharded, half precision, bool, scalar, random key, none."""
    rng = np.random.default_rng(seed)
    kernel = jax.device_put(rng.normal(size=(16, 8)).astype(np.float32), sharding((4, 2), "fsdp", "tensor"))
    policy = {"params": {"layer": {"kernel": kernel}, "scale": jnp.asarray(rng.normal(size=8), jnp.bfloat16)}}
    return TrainState(
        step=jnp.int32(step),
        policy=policy,
        policy_opt=optax.adamw(1e-3).init(policy),
        value={"flag": jnp.array([True, False]), "none": None},
        value_opt=(),
        kl_coef=jnp.float32(0.1),
        bad_steps=jnp.int32(2),
        key=jax.device_put(jax.random.key(seed), sharding((4, 2))),
    )


def equal(a, b):
    def plain(x):
        return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(plain(x)), np.asarray(plain(y)))


def damage(path, at=0.5):
    """Change bytes in the largest data file of a checkpoint."""
    file = max((p for p in path.rglob("*") if "/d/" in str(p)), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    for i in range(int(len(data) * at), int(len(data) * at) + 8):
        data[i] ^= 0x55
    file.write_bytes(data)


def test_a_train_state_comes_back_bit_for_bit(tmp_path):
    saved = state(3)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, saved, {"cursor": {"epoch": 1, "index": 64}})
        restored = checkpoints.restore_latest(saved)
    assert (restored.step, restored.meta) == (3, {"cursor": {"epoch": 1, "index": 64}})
    equal(restored.state, saved)


@pytest.mark.parametrize("large,cut", [(checkpoint_arrays.LARGE, False), (0, True)])
def test_only_large_arrays_that_all_devices_hold_are_cut_by_programs(tmp_path, monkeypatch, caplog, large, cut):
    monkeypatch.setattr(checkpoint_arrays, "LARGE", large)
    array = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    saved = dataclasses.replace(state(1), value={"held": jax.device_put(array, sharding((8, 1)))})
    jax.clear_caches()
    with Checkpoints(tmp_path, keep=1) as checkpoints, jax.log_compiles():
        checkpoints.save(1, saved, {})
    assert ("slice" in caplog.text) == cut and "_examine" in caplog.text
    equal(restore(tmp_path / "1", saved).state, saved)


def test_restore_onto_another_sharding(tmp_path):
    saved = state(1)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, saved, {})
    there = sharding((2, 4), "tensor")
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding((2, 4))), saved)
    like.policy["params"]["layer"]["kernel"] = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=there)
    restored = restore(tmp_path / "1", like)
    assert restored.state.policy["params"]["layer"]["kernel"].sharding == there
    equal(restored.state, saved)


def test_the_last_ones_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() is None and checkpoints.restore_latest(state(0)) is None
        for step in (1, 2, 3):
            checkpoints.save(step, state(step), {})
    assert checkpoints.steps() == [2, 3] and checkpoints.latest() == 3


def test_arrays_may_be_donated_once_save_has_returned(tmp_path):
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    big = jnp.zeros((1 << 22,))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"x": big}, {})
        for _ in range(5):
            big = bump(big)
        big.block_until_ready()
        restored = checkpoints.restore_latest({"x": big})
    assert float(jnp.abs(restored.state["x"]).max()) == 0.0


@pytest.mark.parametrize("how", ["bytes", "cut", "about", "lacking", "changed"])
def test_a_damaged_checkpoint_is_skipped_and_said(tmp_path, capsys, how):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.asarray(np.random.default_rng(step).normal(size=4096))}, {})
    if how == "bytes":
        damage(tmp_path / "2")
    elif how == "cut":
        file = max((p for p in (tmp_path / "2").rglob("*") if "/d/" in str(p)), key=lambda p: p.stat().st_size)
        os.truncate(file, file.stat().st_size // 2)
    else:
        file = tmp_path / "2/about/metadata"
        changed = json.dumps(json.loads(file.read_text()) | {"meta": {"cursor": 7}})
        file.write_text({"about": '{"step": ', "lacking": '{"step": 2}', "changed": changed}[how])
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        restored = checkpoints.restore_latest({"x": jnp.zeros(4096)})
        assert restored.step == 1
        assert "2 is damaged and skipped" in capsys.readouterr().out and checkpoints.steps() == [1]
        checkpoints.save(2, {"x": jnp.ones(4096)}, {})
        assert checkpoints.restore_latest({"x": jnp.zeros(4096)}).step == 2


def test_a_checkpoint_of_another_model_is_the_users_to_mend(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"x": jnp.zeros(4)}, {})
        with pytest.raises(UserError, match=r"\['x'\] was saved as .*\[4\].* now it is .*\[5\]"):
            checkpoints.restore_latest({"x": jnp.zeros(5)})
        with pytest.raises(UserError, match=r"\['y'\] is in the model or optimizer of this run only"):
            checkpoints.restore_latest({"x": jnp.zeros(4), "y": jnp.zeros(1)})
        assert checkpoints.steps() == [1]  # it is not damaged


def test_a_path_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(UserError, match="is no readable checkpoint"):
        restore(tmp_path, {})


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(UserError, match=r"resume_mode=.*nowhere: no such checkpoint"):
        restore(tmp_path / "nowhere", {})


def test_going_on_from_an_earlier_step_discards_the_later_ones(tmp_path, capsys):
    with Checkpoints(tmp_path, keep=5) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": jnp.zeros(1)}, {})
        checkpoints.discard_after(1)
        assert checkpoints.steps() == [1] and "[2, 3]" in capsys.readouterr().out


KILLED = """
    import os, pathlib, signal, sys, threading, time
    import jax.numpy as jnp
    from jppo.runlog.checkpoint import Checkpoints

    directory = pathlib.Path(sys.argv[1])
    checkpoints = Checkpoints(directory, keep=3)
    checkpoints.save(1, {"x": jnp.ones(1 << 20)}, {})
    checkpoints.wait()

    def kill_when_half_written():
        while not list(directory.glob("2.orbax-checkpoint-tmp*")):
            time.sleep(0.0002)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_when_half_written).start()
    checkpoints.save(2, {"x": jnp.full(1 << 26, 2.0)}, {})
    checkpoints.wait()
"""


def test_sigkill_in_the_middle_of_a_save_leaves_the_one_before(tmp_path):
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], env=os.environ, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name], "the save was not under way"
    with Checkpoints(pathlib.Path(tmp_path), keep=3) as checkpoints:
        assert checkpoints.restore_latest({"x": jnp.zeros(1 << 20)}).step == 1
        assert not [p.name for p in tmp_path.iterdir() if "tmp" in p.name]


def test_the_best_is_kept_beside_the_last_ones(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step, value in ((1, 0.2), (2, 0.9), (3, 0.5)):
            checkpoints.save(step, state(step), {}, score=("val/score", value))
        checkpoints.save(4, state(4), {})  # no test was made at this one
        checkpoints.wait()
        assert checkpoints.steps() == [2, 4]
        assert checkpoints.best() == {"step": 2, "metric": "val/score", "value": 0.9}
    with Checkpoints(tmp_path, keep=1) as checkpoints:  # also when the run goes on
        checkpoints.save(5, state(5), {}, score=("val/score", 0.9))  # of equals the later
        checkpoints.wait()
        assert checkpoints.steps() == [5] and checkpoints.best()["step"] == 5
        checkpoints.save(6, state(6), {}, score=("val/other", 0.1))  # of another metric: not to be compared
        checkpoints.wait()
        assert checkpoints.best() == {"step": 6, "metric": "val/other", "value": 0.1}
        checkpoints.discard_after(5)
        assert checkpoints.best() is None


@pytest.mark.parametrize("resumed", [-1, 10])
def test_a_best_checkpoint_that_is_removed_is_compared_with_no_later_run(tmp_path, resumed):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(20, state(20), {}, score=("val/score", 0.6))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.discard_after(resumed)
        for step, value in ((20, 0.4), (30, 0.5)):
            checkpoints.save(step, state(step), {}, score=("val/score", value))
        checkpoints.wait()
        assert checkpoints.best() == {"step": 30, "metric": "val/score", "value": 0.5} and checkpoints.steps() == [30]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": "x"}'])
def test_a_cut_note_of_the_best_is_as_none(tmp_path, text):
    (tmp_path / "best.json").write_text(text)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.best() is None


def test_a_model_directory_comes_with_the_checkpoint_or_not_at_all(tmp_path):
    def export(path):
        path.mkdir()
        (path / "config.json").write_text("{}")

    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, state(1), {}, export=export)
        checkpoints.wait()
        assert (tmp_path / "1/hf/config.json").is_file()
        restored = checkpoints.restore_latest(state(0))
        equal(restored.state, state(1))
    (tmp_path / "2.hf-tmp").mkdir()  # as a kill leaves it
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.steps() == [1] and not list(tmp_path.glob("*.hf-tmp"))


def test_a_state_without_its_optimizer(tmp_path):
    saved = state(1)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, dataclasses.replace(saved, policy_opt=None), {})
        other = state(5, seed=3)
        with pytest.raises(UserError, match=r"policy_opt"):  # as ever, where it is not optional
            checkpoints.restore_latest(other)
        restored = checkpoints.restore_latest(other, optional=("policy_opt", "value_opt"))
    assert restored.missing == ("policy_opt",)
    equal(restored.state, dataclasses.replace(saved, policy_opt=other.policy_opt))


def test_what_speaks_against_a_checkpoint_is_heard_before_its_arrays(tmp_path):
    def refuse(meta):
        raise UserError(f"not with {meta['seed']}")

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(1), {"seed": 7})
        with pytest.raises(UserError, match="not with 7"):
            checkpoints.restore_latest({"other": jnp.zeros(3)}, fits=refuse)


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small disk needs root on Linux")
def test_a_full_disk_costs_that_checkpoint_only(tmp_path, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with Checkpoints(disk, keep=2) as checkpoints:
            checkpoints.save(1, state(1), {})
            checkpoints.wait()
            free = os.statvfs(disk)
            filler = disk / "filler"
            filler.write_bytes(bytes(free.f_bavail * free.f_frsize - 8192))
            checkpoints.save(2, state(2), {})
            checkpoints.wait()
            said = capsys.readouterr().out
            assert "checkpoint 2 could not be written" in said and "the checkpoint of step 1 remains" in said
            assert checkpoints.steps() == [1] and not list(disk.glob("*tmp*"))
            equal(checkpoints.restore_latest(state(0)).state, state(1))
            filler.unlink()
            checkpoints.save(3, state(3), {})  # there is room again
            checkpoints.wait()
            assert checkpoints.steps() == [1, 3]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_checkpoint_of_the_same_step_is_replaced_by_what_is_known_later(tmp_path, capsys):
    """As by a run that was stopped in the test of a step that was due to be saved."""

    def export(path):
        path.mkdir()

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(1), {"pending": {"x": 1.0}})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(1), {"pending": None}, score=("val/score", 0.5), export=export)
        restored = checkpoints.restore_latest(state(0))
    assert restored.meta == {"pending": None} and (tmp_path / "1/hf").is_dir()
    assert checkpoints.best() == {"step": 1, "metric": "val/score", "value": 0.5}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "best.json"] and capsys.readouterr().out == ""


@pytest.mark.parametrize("of", ["a thread", "an event loop"])
def test_a_failed_save_waits_until_nothing_of_it_writes(tmp_path, monkeypatch, capsys, of):
    """Something makes a folder after another part has failed, as on a busy machine whose disk is full."""
    full, late = OSError(28, "No space left on device"), []

    def make_folder(path):
        time.sleep(0.5)
        path.mkdir(parents=True)
        late.append(path)

    async def fails(*_):
        raise full

    async def abandons(_, path):
        asyncio.get_running_loop().run_in_executor(None, make_folder, path)
        raise full

    async def takes_long(_, path):
        make_folder(path)

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(1), {})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            if of == "a thread":
                patch.setattr(ocp.JsonCheckpointHandler, "_save_fn", fails)
            make = abandons if of == "an event loop" else takes_long
            patch.setattr(array_metadata_store.Store, "_maybe_create_base_dir", make)
            checkpoints.save(2, state(2), {})
            checkpoints.wait()
        assert late and checkpoints.steps() == [1] and not list(tmp_path.glob("*tmp*"))
        assert "checkpoint 2 could not be written" in capsys.readouterr().out
        checkpoints.save(3, state(3), {})
        checkpoints.wait()
        assert checkpoints.steps() == [3]


def test_a_save_without_its_folder_leaves_no_thread_that_waits_for_it(tmp_path, capsys):
    disk = tmp_path / "checkpoints"
    with Checkpoints(disk, keep=1) as checkpoints:
        disk.rmdir()
        disk.write_text("")
        checkpoints.save(1, state(1), {})
        checkpoints.wait()
        assert "checkpoint 1 could not be written" in capsys.readouterr().out
        assert not [thread for thread in threading.enumerate() if type(thread).__module__.startswith("orbax.")]


def test_a_failed_save_leaves_nothing_though_its_threads_still_write(tmp_path):
    ended = time.monotonic() + 1

    def write_on(path):
        while path.is_dir() and time.monotonic() < ended:
            with contextlib.suppress(FileNotFoundError):
                (path / str(time.monotonic_ns())).touch()

    def full(path):
        path.mkdir()
        threading.Thread(target=write_on, args=[path]).start()
        raise OSError("no room")

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(1), {}, export=full)
        assert not list(tmp_path.iterdir())


def test_a_checkpoint_stands_until_the_one_of_the_same_step_is_complete(tmp_path, capsys):
    def full(path):
        raise OSError("no room")

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(1), {"cursor": 1})
        checkpoints.save(1, state(1), {"cursor": 2}, export=full)
        assert "checkpoint 1 could not be written" in capsys.readouterr().out
        assert checkpoints.restore_latest(state(0)).meta == {"cursor": 1}
    (tmp_path / "1").rename(tmp_path / "1.replaced")  # as a kill in the save leaves it
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.restore_latest(state(0)).meta == {"cursor": 1} and checkpoints.steps() == [1]
    (tmp_path / "1.replaced").mkdir()  # as one right behind it does
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.steps() == [1] and [p.name for p in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["policy", "policy_opt"])
def test_what_is_not_finite_is_not_saved(tmp_path, field, value):
    good = state(2)
    odd = dataclasses.replace(
        good, **{field: jax.tree.map(lambda x: x.at[0].set(value) if x.ndim else x, getattr(good, field))}
    )
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, good, {})
        with pytest.raises(checkpoint.NonFinite, match=rf"\.{field}.* has values that are not finite numbers"):
            checkpoints.save(2, odd, {})
        assert checkpoints.restore_latest(good).step == 1


def test_one_that_was_saved_all_the_same_is_skipped(tmp_path, capsys, monkeypatch):
    good = state(2)
    odd = dataclasses.replace(good, policy=jax.tree.map(lambda x: x * jnp.asarray(np.nan, x.dtype), good.policy))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, good, {})
        with monkeypatch.context() as patch:
            real = checkpoint_arrays.examine
            finite = lambda arrays: {name: (True, bits) for name, (_, bits) in real(arrays).items()}  # noqa: E731
            patch.setattr(checkpoint_arrays, "examine", finite)  # as earlier versions did
            checkpoints.save(2, odd, {})
        assert checkpoints.restore_latest(good).step == 1
    assert "checkpoint 2 is damaged and skipped, renamed to 2.damaged" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.damaged"]


FAILING = """
import pathlib, resource, sys
import jax.numpy as jnp
from jppo.runlog.checkpoint import Checkpoints
with Checkpoints(pathlib.Path(sys.argv[1]), keep=2) as checkpoints:
    checkpoints.save(1, {"w": jnp.arange(100000.0)}, {})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    checkpoints.save(2, {"w": jnp.arange(100000.0)}, {})
    checkpoints.wait()
"""


def test_a_save_that_fails_is_one_sentence(tmp_path):
    done = subprocess.run([sys.executable, "-c", FAILING, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert line.startswith("checkpoint 2 could not be written") and "the checkpoint of step 1 remains" in line
