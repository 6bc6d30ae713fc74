"""Whether two commits compute the same: python scripts/compare_commits.py --base=COMMIT [--only=WORD,...] [--cases]

Short trainings of small models on a CPU, one for each choice that a step can make, run in a checkout of the base
commit and in this one. Nothing random differs between the two: a stand-in for the engine draws responses from the
seeds that it is given, whatever the weights. Three levels are compared for each case:

    programs   the StableHLO of every program that was compiled, but for the small ones of single operations
    gradient   one step of SGD from the same weights: how far the two steps are apart, in the length of the step
    run        three steps with the optimizers of the case: metrics, and the arrays of the last checkpoint

Conversations, branches of agents, references of servers and several hosts are not among the cases.

`same` is to the bit. Exit code 1: a program differs, or a gradient by more than 2e-6, or a metric of a run or an array
by more than rounding. The results of the base are kept in --kept (default: runs/compare) by its commit.
"""

import argparse
import collections
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
import zlib
from concurrent.futures import Future

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMALL = 2_000  # characters of the program of a single operation, which a change of host code may add
# In the sources, and names of functions and of results.
PLACES = r"^#loc.*\n| loc\((?:[^()]|\([^()]*\))*\)|@jit_\w+|jax.result_info = \"[^\"]*\""
RATE = 0.1  # of the step of SGD
GRADIENT = 2e-6  # ‖Δ‖ / ‖step‖
ROUNDING = 1e-4  # of a run's metrics and weights, whose optimizer magnifies rounding
TIMES = ("timing_s/", "perf/", "memory/", "rollout/sampling_s", "rollout/hidden")

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    digits = [int(c) for c in solution_str if c.isdigit()]
    return {"score": sum(digits) / 9 - 1, "length": len(solution_str) / 6, "ones": float(digits.count(1))}

def earned(data_source, solution_str, ground_truth, extra_info=None):
    amounts = [int(c) / 9 if c.isdigit() else 0.0 for c in solution_str]
    return {"score": sum(amounts), "spans": [(i, i + 1, x) for i, x in enumerate(amounts)]}

def sometimes(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) > 3 and ground_truth > "5")
"""
GRPO = {"algorithm.adv_estimator": "grpo", "rollout.n": 4}
KLS = {"algorithm.use_kl_in_reward": True, "algorithm.kl_coef": 0.2, "actor.use_kl_loss": True}
KLS |= {"actor.kl_loss_coef": 0.1}
SHUFFLED = {"actor.shuffle": True, "critic.shuffle": True}
CORRECTED = {"algorithm.old_logprob": "correction"}
LORA = {"model.lora_rank": 4}
# name -> changed settings of a PPO run; `devices` is how many there are, `model` which
CASES: dict[str, dict] = {
    "plain": {},
    "two epochs shuffled": SHUFFLED | {"actor.ppo_epochs": 2, "critic.ppo_epochs": 3},
    "critic of its own": {"critic.lam": 0.9, "algorithm.lam": 0.8, "algorithm.gamma": 0.9,
                          "critic.ppo_mini_batch_size": 2},
    "critic warmup": {"trainer.critic_warmup": 1, "critic.warmup_epochs": 2},
    "value norm": {"critic.value_norm_decay": 0.9},
    "histogram critic": {"critic.value_bins": 11, "critic.value_range": (-2.0, 2.0), "critic.value_head_std": 0.1},
    "adaptive lambda": {"algorithm.lam_alpha": 0.2, "algorithm.lam": 0.9},
    "kl in reward and loss": KLS,
    "adaptive kl": KLS | {"algorithm.kl_ctrl_type": "adaptive", "algorithm.target_kl": 0.01, "algorithm.horizon": 100},
    "exact kl": KLS | {"algorithm.kl_penalty": "full", "actor.kl_loss_type": "full"},
    "top-k kl": KLS | {"actor.kl_loss_type": "forward_kl_topk", "actor.kl_topk": 3, "actor.kl_loss_max_clamp": 5.0},
    "distill": {"algorithm.adv_estimator": "distill", "algorithm.use_kl_in_reward": True, "algorithm.kl_coef": 1.0},
    "entropy": {"actor.entropy_coeff": 0.02},
    "no entropy": {"actor.calculate_entropy": False},
    "positive examples": {"actor.positive_lm_coef": 0.3, "reward.function": "sometimes"},
    "sequence means": {"actor.loss_agg_mode": "seq-mean-token-sum-norm", "critic.loss_agg_mode": "seq-mean-token-mean"},
    "earned": {"reward.function": "earned", "algorithm.gamma": 0.95},
    "grpo": GRPO,
    "grpo with kl": GRPO | KLS,
    "dr grpo": GRPO | {"algorithm.norm_adv_by_std_in_grpo": False, "actor.loss_agg_mode": "seq-mean-token-sum"},
    "rloo": GRPO | {"algorithm.adv_estimator": "rloo"},
    "remax": {"algorithm.adv_estimator": "remax"},
    "reinforce++": {"algorithm.adv_estimator": "reinforce_plus_plus"},
    "reinforce++ baseline": GRPO | {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
    "opo": GRPO | {"algorithm.adv_estimator": "opo"},
    "gpg": GRPO | {"algorithm.adv_estimator": "gpg", "actor.loss_mode": "gpg"},
    "grpo passk": GRPO | {"algorithm.adv_estimator": "grpo_passk"},
    "gdpo": GRPO | {"algorithm.adv_estimator": "gdpo",
                    "algorithm.gdpo_reward_keys": "function_score,function_score/length"},
    "token baseline": GRPO | {"algorithm.adv_estimator": "optimal_token_baseline"},
    "turn baseline": GRPO | {"algorithm.adv_estimator": "tir_optimal_token_baseline"},
    "clip_cov": GRPO | {"actor.loss_mode": "clip_cov", "actor.clip_cov_ratio": 0.2, "actor.clip_cov_lb": -5.0},
    "kl_cov": GRPO | {"actor.loss_mode": "kl_cov", "actor.kl_cov_ratio": 0.2},
    "gspo": GRPO | {"actor.loss_mode": "gspo", "actor.loss_agg_mode": "seq-mean-token-mean"},
    "geo_mean": GRPO | {"actor.loss_mode": "geo_mean"},
    "sapo": GRPO | {"actor.loss_mode": "sapo"},
    "cispo": GRPO | {"actor.loss_mode": "cispo"},
    "dro": GRPO | {"actor.loss_mode": "dro", "actor.dro_beta": 0.1},
    "correction by token": CORRECTED | {"algorithm.rollout_is": "token", "algorithm.rollout_rs": "token_k1",
                            "algorithm.rollout_rs_threshold": "0.5_2.0"},
    "correction by sequence": CORRECTED | {"algorithm.rollout_is": "sequence",
                                           "algorithm.rollout_is_batch_normalize": True},
    "bypass": {"algorithm.old_logprob": "bypass"},
    "bypass by policy gradient": GRPO | {"algorithm.old_logprob": "bypass", "algorithm.rollout_is": "token",
                                         "actor.loss_mode": "gpg"},
    "truncated are left out": {"algorithm.filter_truncated": True},
    "dynamic sampling": GRPO | {"algorithm.filter_groups": True, "reward.function": "sometimes"},
    "prefetched": {"rollout.mode": "async"},
    "mask replay": {"rollout.top_p": 0.9, "rollout.mask_replay": True, "rollout.mask_replay_tokens": 8},
    "muon": {"actor.optimizer": "muon", "critic.optimizer": "adafactor"},
    "bfloat16": {"model.param_dtype": "bfloat16", "model.compute_dtype": "bfloat16", "actor.moments_dtype": "bfloat16"},
    "adapters": LORA | KLS | {"model.lora_dropout": 0.2},
    "adapters on int8": LORA | {"model.base_quantization": "int8", "critic.lora_rank": 2},
    "offloaded": KLS | {"actor.param_offload": True, "actor.optimizer_offload": True, "critic.param_offload": True,
                        "critic.optimizer_offload": True, "ref.param_offload": True},
    "none": {"data.packing": "none"},
    "segments": {"data.packing": "segments"} | KLS,
    "prefix": GRPO | {"data.packing": "prefix"},
    "lengths": {"data.packing": "buckets", "data.row_lengths": 3, "actor.max_tokens_per_device": 32},
    "experts": {"model": "experts", "actor.router_aux_loss_coef": 0.1, "actor.router_z_loss_coef": 0.1},
    "routing replay": {"model": "experts", "rollout.routing_replay": True},
    "windows": {"model": "windows", "model.remat": "full", "model.scan_layers": False},
    "data 4": {"devices": 4} | KLS,
    "tensor 2": {"devices": 2, "mesh.tensor": 2} | KLS,
    "fsdp and sequence": {"devices": 4, "mesh.fsdp": 2, "mesh.sequence": 2},
    "experts over devices": {"devices": 4, "model": "experts", "mesh.expert": 2, "actor.router_aux_loss_coef": 0.1},
    "prefix on data 4": GRPO | {"devices": 4, "data.packing": "prefix"},
    "clip_cov on data 4": GRPO | {"devices": 4, "actor.loss_mode": "clip_cov", "actor.clip_cov_ratio": 0.2},
    "in process": {"rollout.name": "inprocess", "rollout.kv_cache_memory_bytes": 2**20},
}  # fmt: skip
OTHERS = ("sft", "reward model", "dpo", "own loop")


class Drawn:
    """In place of vLLM: responses that are drawn by the seeds alone, with the experts and kept tokens if asked for."""

    def __init__(self, experts: tuple[int, int, int] | None) -> None:
        self._experts, self.version = experts, 0  # layers, experts, active

    def ready(self, *, eos_token_ids, decode, talk=None):
        self._end, self._decode = eos_token_ids[0], decode
        return self

    def generate(self, prompts, sampling, *, version, done=None):
        from jppo.types import Trajectory

        out = []
        for i, prompt in enumerate(p for p in prompts for _ in range(sampling.n)):
            rng = np.random.default_rng([sampling.seed, i])
            response = rng.integers(2, 12, rng.integers(1, sampling.max_tokens + 1)).astype(np.int32)
            cut = len(response) == sampling.max_tokens
            response = response if cut else np.append(response, self._end)
            tokens = np.concatenate([prompt.ids, response]).astype(np.int32)
            sampled = np.arange(len(tokens)) >= len(prompt.ids)
            more = {}
            if sampling.experts and self._experts is not None:
                layers, count, active = self._experts
                chosen = np.argsort(rng.random((len(tokens), layers, count)))[:, :, :active].astype(np.int16)
                chosen[-1] = -1
                more["experts"] = chosen
            if sampling.kept:
                kept = np.full((len(tokens), 8), -1, np.int32)
                for t in np.flatnonzero(sampled):
                    others = rng.permutation(np.setdiff1d(np.arange(12), tokens[t]))[: rng.integers(0, 7)]
                    kept[t, : len(others) + 1] = np.sort(np.append(others, tokens[t]))
                more["kept"] = kept
            text = self._decode(response[:-1] if not cut else response)
            logprob = np.where(sampled, rng.normal(-3.3, 0.3, len(tokens)), 0.0).astype(np.float32)
            versions = np.where(sampled, version, -1).astype(np.int32)
            finish = "length" if cut else "stop"
            out.append(Trajectory(prompt.uid, tokens, sampled, logprob, versions, text, finish, 1, **more))
            if done is not None:
                done(len(out) - 1, out[-1])
        return out

    def start(self, prompts, sampling, *, done=None, only=None):
        future, wanted = Future(), range(len(prompts) * sampling.n) if only is None else only
        everything = self.generate(prompts, sampling, version=self.version)
        for number in wanted:
            done(number, everything[number])
        future.set_result([everything[number] for number in wanted])
        return future

    def probe(self, prompts, sampling):
        return self.generate(prompts, sampling, version=self.version)

    def load(self, tensors, *, version, mode="wait"):
        self.version = version
        for _ in tensors:
            pass

    def sleep(self):
        pass

    def metrics(self):
        return {}

    def close(self):
        pass


def write_inputs(folder: pathlib.Path) -> None:
    """Writes data, reward functions and three models of two layers with weights."""
    from examples import arithmetic
    from tests import make

    made = arithmetic.make(seed=0, test=8, sloppy=0.5, demonstrations=1)
    for name in ("train", "test", "sft"):
        make.write_lines(folder / f"{name}.jsonl", made[name][:16])
    rng = np.random.default_rng(0)

    def answer() -> str:
        return "".join(rng.choice(list("0123456789"), rng.integers(1, 6)))

    pairs = [{"prompt": f"{i}+4=", "chosen": answer(), "rejected": answer()} for i in range(16)]
    make.write_lines(folder / "pairs.jsonl", pairs)
    (folder / "mine.py").write_text(REWARD)
    for command in ("", "sft_", "reward_model_", "dpo_"):
        (folder / f"{command}config.py").write_text(f"from jppo.settings import {command}default as get_config\n")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
    experts = arithmetic.MIXTURE | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    for seed, (name, more) in enumerate({"small": {}, "experts": experts, "windows": windows, "teacher": {}}.items()):
        arithmetic.write_model(folder / name)
        (folder / name / "config.json").write_text(json.dumps(arithmetic.MODEL | shape | more))
        make.write_weights(folder / name, seed=seed)


def words(inputs: pathlib.Path, run: pathlib.Path, changes: dict, *, sgd: bool) -> list[str]:
    """The command line of a PPO run with these changes."""
    given = {
        "data.train_files": f"{inputs}/train.jsonl", "data.val_files": f"{inputs}/test.jsonl",
        "data.train_batch_size": 4, "data.max_prompt_length": 8, "data.max_response_length": 6, "data.row_lengths": 1,
        "actor.ppo_mini_batch_size": 4, "actor.lr": 1e-2,
        "rollout.logp_tolerance": 100.0, "rollout.max_kl_jump": 1e9, "reward.workers": 1,
        "reward.function": "compute_score", "trainer.run_dir": run, "trainer.total_training_steps": 3,
        "trainer.test_freq": -1, "trainer.val_before_train": False, "trainer.save_freq": 3, "trainer.logger": "jsonl",
    }  # fmt: skip
    given |= {name: value for name, value in changes.items() if name not in ("model", "devices")}
    given["model.path"] = inputs / changes.get("model", "small")
    trained = ("actor", "critic") if given.get("algorithm.adv_estimator", "gae") == "gae" else ("actor",)
    if "critic" in trained:
        given = {"critic.lr": 1e-2, "critic.value_head_std": 0.2} | given
    if given.get("algorithm.adv_estimator") == "distill":
        given["ref.path"] = inputs / "teacher"
    samples = int(given["data.train_batch_size"]) * int(given.get("rollout.n", 1))
    given["actor.ppo_mini_batch_size"] = given["actor.ppo_mini_batch_size"] if not sgd else samples
    given["reward.function"] = f"{inputs}/mine.py:{given['reward.function']}"
    if sgd:
        one = {"optimizer": "sgd", "lr": RATE, "grad_clip": 1e9, "weight_decay": 0.0, "betas": (0.0, 0.0)}
        given |= {f"{model}.{name}": value for model in trained for name, value in one.items()}
        given |= {"trainer.total_training_steps": 1, "trainer.save_freq": 1, "actor.ppo_epochs": 1}
        for name in (
            "trainer.critic_warmup",
            "critic.warmup_epochs",
            "critic.ppo_epochs",
            "critic.ppo_mini_batch_size",
        ):
            given.pop(name, None)
    return [f"--config={inputs}/config.py", *(f"--config.{name}={value}" for name, value in given.items())]


def train_ppo(inputs: pathlib.Path, run: pathlib.Path, changes: dict, *, sgd: bool = False) -> list[dict]:
    """Runs PPO with the stand-in for vLLM; returns the metrics of its steps."""
    from jppo import train

    try:
        from jppo.rollout.servers import make as rollout
    except ImportError:  # of a base before it
        from jppo.rollout import make as rollout  # type: ignore[no-redef]

    mixture = (2, 4, 2) if changes.get("model") == "experts" else None
    rollout.start_vllm = lambda *_, **__: Drawn(mixture)
    train.main(words(inputs, run, changes, sgd=sgd))
    return [line for line in read_lines(run / "metrics.jsonl") if line["step"]]


def train_other(inputs: pathlib.Path, run: pathlib.Path, name: str) -> list[dict]:
    """Runs another training for three steps; returns the metrics of its steps."""
    import importlib

    word, file = name.replace(" ", "_"), "sft" if name == "sft" else "pairs"
    given = {
        "model.path": inputs / "small", "data.train_files": inputs / f"{file}.jsonl", "data.train_batch_size": 8,
        **({} if name == "sft" else {"data.val_files": inputs / "pairs.jsonl"}),
        "data.max_prompt_length": 8, "data.max_response_length": 8, "optim.lr": 1e-2, "trainer.run_dir": run,
        "trainer.total_training_steps": 3, "trainer.save_freq": 3, "trainer.logger": "jsonl",
    }  # fmt: skip
    changed = (f"--config.{setting}={value}" for setting, value in given.items())
    importlib.import_module(f"jppo.{word}").main([f"--config={inputs}/{word}_config.py", *changed])
    return [line for line in read_lines(run / "metrics.jsonl") if line["step"]]


def own_loop(inputs: pathlib.Path, run: pathlib.Path) -> list[dict]:
    """Runs a loop on `jppo.open` with every kind of loss, and the in-process engine; returns its numbers."""
    import jppo

    def far(view):
        return -view.advantage * (view.logprob - view.old_logprob) - 0.01 * view.entropy

    data = dict(max_prompt_length=8, max_response_length=6, row_lengths=1)
    engine = dict(name="inprocess", kv_cache_memory_bytes=2**20)
    actor = dict(lr=1e-2, ppo_mini_batch_size=4, entropy_coeff=0.01)
    given = dict(engine=engine, data=data, actor=actor, lora=4, critic=True, ref=dict(path="policy"))
    found = []
    with jppo.open(str(inputs / "small"), **given) as m:
        for step in range(3):
            samples = m.sample(["12+34=", "5+6=", "78+9="], n=2)
            batch, rng = m.batch(samples), np.random.default_rng(step)
            drawn = {name: rng.normal(size=batch.mask.shape) for name in ("advantage", "returns")}
            read = dict(ref_logprob=m.reference_logprobs(batch), value=m.values(batch))
            batch = batch.replace(old_logprob=m.logprobs(batch), **read, **drawn)
            numbers = {f"{name}/{i}": float(x) for name, value in read.items() for i, x in enumerate(value.sum(1))}
            for loss in (None, "ppo", "gspo", "cross_entropy", far, "value"):
                metrics, _ = m.forward_backward(batch, loss)
                numbers |= {f"{getattr(loss, '__name__', loss)}/{name}": x for name, x in metrics.items()}
            numbers |= m.optim_step()
            m.publish()
            found.append({"step": step + 1} | numbers | {"tokens": [int(x) for t in samples for x in t.tokens]})
        m.save(run)
    return found


def read_lines(path: pathlib.Path) -> list[dict]:
    """Reads JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_arrays(run: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads all arrays of the last checkpoint."""
    import jax
    import orbax.checkpoint as ocp

    last = max((run / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as reader:
        about = reader.metadata(last / "state").item_metadata
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), dict(about))
        return {name: np.asarray(x, np.float32) for name, x in reader.restore(last / "state", target).items()}


def take_programs(folder: pathlib.Path) -> dict[str, str]:
    """Returns hash -> name of the programs that JAX has written to a folder, and empties it."""
    found = {}
    for path in folder.glob("*.mlir"):
        text = path.read_text()
        path.unlink()
        name = re.search(r"module @(\S+)", text)[1]
        text = re.sub(PLACES, "", text, flags=re.M)
        for axis in re.findall(r'"(\w+)"=1\b', text):  # over one device nothing is sharded
            text = re.sub(rf'"{axis}"(?!=)(, )?', "", text).replace(", }", "}")
        if len(text) > SMALL:
            found[hashlib.sha256(text.encode()).hexdigest()[:16]] = name
    return found


def work(inputs: pathlib.Path, out: pathlib.Path, names: list[str]) -> None:
    """Runs cases with the jppo that Python imports; writes a file of results for each."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_dump_ir_to", str(out / "programs"))
    for name in names:
        print(f"-- {name}", flush=True)
        found: dict = {"programs": {}}
        for level in ("run",) if name in OTHERS else ("gradient", "run"):
            run = out / "run"
            shutil.rmtree(run, ignore_errors=True)
            jax.clear_caches()
            take_programs(out / "programs")
            try:
                if name == "own loop":
                    found[level] = own_loop(inputs, run)
                elif name in OTHERS:
                    found[level] = train_other(inputs, run, name)
                else:
                    found[level] = train_ppo(inputs, run, CASES[name], sgd=level == "gradient")
                np.savez(out / f"{name} {level}.npz", **read_arrays(run))
            except (Exception, SystemExit):
                found["error"] = traceback.format_exc()
                print(found["error"], flush=True)
                break
            found["programs"] |= take_programs(out / "programs")
        (out / f"{name}.json").write_text(json.dumps(found))


def measure(checkout: pathlib.Path, inputs: pathlib.Path, out: pathlib.Path, names: list[str]) -> None:
    """Runs the cases that `out` lacks, in processes with as many devices as they ask for."""
    out.mkdir(parents=True, exist_ok=True)
    from tests import xla_flags

    by_devices = collections.defaultdict(list)
    for name in names:
        if not (out / f"{name}.json").exists():
            by_devices[CASES.get(name, {}).get("devices", 1)].append(name)
    for devices, some in by_devices.items():
        env = os.environ | {
            "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags.quick(devices),
            "HF_HUB_OFFLINE": "1",
            "JAX_COMPILATION_CACHE_DIR": str(out.parent / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }  # fmt: skip
        command = [sys.executable, __file__, "--work", inputs, out, *some]
        with open(out / f"log-{devices}.txt", "w") as log:
            code = subprocess.run(command, cwd=checkout, env=env, stdout=log, stderr=subprocess.STDOUT).returncode
        if code:
            sys.exit(f"{checkout}: {(out / f'log-{devices}.txt').read_text()[-3000:]}")


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Returns ‖a - b‖ over all arrays."""
    if a.keys() != b.keys() or any(np.shape(b[name]) not in ((), a[name].shape) for name in a):
        return math.inf
    return math.sqrt(sum(float(np.sum(np.square(a[name] - b[name], dtype=np.float64))) for name in a))


def length(level: str, arrays: dict[str, np.ndarray], metrics: list[dict]) -> float:
    """Returns the length by which a distance is measured: of the one step of SGD, or of all arrays."""
    if level == "gradient":
        return RATE * math.hypot(*(metrics[0].get(f"{model}/grad_norm", 0.0) for model in ("actor", "critic")))
    return distance(arrays, dict.fromkeys(arrays, np.float32(0)))


def furthest(base: list[dict], now: list[dict]) -> tuple[float, str]:
    """Returns the largest difference of a metric, relative to its largest value in the run, and its name."""
    if len(base) != len(now):
        return math.inf, f"{len(now)} steps"
    worst = 0.0, ""
    names = {name for line in (*base, *now) for name in line if not name.startswith(TIMES)}
    for name in sorted(names):
        a, b = ([line.get(name) for line in lines] for lines in (base, now))
        if a == b or str(a) == str(b):
            continue
        numbers = all(isinstance(x, int | float) for x in (*a, *b))
        scale = max(map(abs, (*a, *b))) if numbers else 0.0
        off = max(abs(x - y) for x, y in zip(a, b, strict=True)) / scale if scale else math.inf
        worst = max(worst, (off, name))
    return worst


def compare(base: pathlib.Path, now: pathlib.Path, name: str) -> tuple[list[str], bool]:
    """Returns a row of the table, and whether the case is the same within rounding."""
    a, b = (json.loads((folder / f"{name}.json").read_text()) for folder in (base, now))
    if "error" in a or "error" in b:
        return [name, "failed here" if "error" in b else "failed at the base", "", ""], False
    lost, new = a["programs"].keys() - b["programs"].keys(), b["programs"].keys() - a["programs"].keys()
    programs = f"{len(a['programs'])} same" if not lost | new else ", ".join(
        [f"- {a['programs'][one]}" for one in sorted(lost)] + [f"+ {b['programs'][one]}" for one in sorted(new)]
    )  # fmt: skip
    cells, good = [name, programs], not lost | new
    for level in ("gradient", "run"):
        if level not in a:
            cells.append("")
            continue
        arrays = [dict(np.load(folder / f"{name} {level}.npz")) for folder in (base, now)]
        off, metric = furthest(a[level], b[level])
        weights = distance(*arrays) / length(level, arrays[0], a[level])
        cells.append("same" if off == weights == 0 else f"arrays {weights:.1e}, {metric or 'metrics'} {off:.1e}")
        good &= off <= ROUNDING and weights <= (GRADIENT if level == "gradient" else ROUNDING)
    return cells, good


def main() -> None:
    """Compares this checkout with the base commit."""
    if sys.argv[1:2] == ["--work"]:
        inputs, out, *names = sys.argv[2:]
        return work(pathlib.Path(inputs), pathlib.Path(out), names)
    sys.path.insert(0, str(ROOT))  # here alone: the cases run with the checkout that PYTHONPATH names
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="commit to compare with")
    parser.add_argument("--kept", type=pathlib.Path, default=ROOT / "runs/compare", help="folder of inputs and results")
    parser.add_argument("--only", help="cases, separated by commas; default: all")
    parser.add_argument("--cases", action="store_true", help="print the names of the cases")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else [*CASES, *OTHERS]
    if args.cases:
        return print("\n".join(names))
    if unknown := {*names} - {*CASES, *OTHERS}:
        sys.exit(f"--only={min(unknown)}: no such case; --cases prints them")
    commit = subprocess.run(["git", "rev-parse", args.base], cwd=ROOT, check=True, capture_output=True, text=True)
    sha, kept = commit.stdout.strip()[:12], args.kept.absolute()
    base = kept / f"{sha}-{zlib.crc32(pathlib.Path(__file__).read_bytes()):08x}"  # another script takes other hashes
    inputs = kept / "inputs"
    if not inputs.is_dir():
        inputs.mkdir(parents=True)
        write_inputs(inputs)
    with tempfile.TemporaryDirectory() as folder:
        checkout = pathlib.Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", checkout, sha], cwd=ROOT, check=True)
        try:
            measure(checkout, inputs, base, names)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", checkout], cwd=ROOT, check=True)
    shutil.rmtree(kept / "now", ignore_errors=True)
    measure(ROOT, inputs, kept / "now", names)
    results = [compare(base, kept / "now", name) for name in names]
    rows = [["case", "programs", "one step of SGD", "three steps"], *(row for row, _ in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    different = sum(not good for _, good in results)
    print(f"\n{len(names) - different} of {len(names)} cases are the same as at {sha}")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
