"""Rules between the settings of the rollout: sampling, the engine, conversations, servers' addresses and secrets."""

import re
from collections.abc import Callable, Iterator
from functools import partial

from jppo.errors import UserError
from jppo.settings import texts
from jppo.settings.table import PPO, Loop, Settings
from jppo.settings.table_run import RewardModel, RewardSection, Rollout, ValKwargs

CUTS = ("top_p", "top_k", "min_p")  # settings that remove tokens from the distribution
COLDEST, HOTTEST = 0.01, 2.0  # temperatures of vLLM, which raises lower ones to 0.01 with only a log message
LARGEST_SERVED_RANK = 512  # of adapters in vLLM


def cuts(section: Rollout | ValKwargs) -> dict[str, float]:
    """Returns the settings of `CUTS` that a section sets, with their values."""
    return {name: getattr(section, name) for name in CUTS if getattr(section, name) != PPO[f"rollout.{name}"].default}


def rollout_rules(config: Loop, *, training: bool) -> Iterator[Callable[[], None]]:
    """Yields the rules between the settings of rollouts as functions; without `training`, those of an evaluation."""
    r = config.rollout
    yield partial(_check_last_port, r)
    yield partial(_check_temperatures, r, training)
    yield partial(_check_test_sampling, r.val_kwargs)
    yield partial(_check_conversation, r)
    yield partial(_check_history, r)
    yield partial(check_secrets, config)
    yield partial(check_publish, r)
    yield partial(_check_speculation, r)
    if training:
        for rule in (_check_routing_replay, _check_sglang, _check_async):
            yield partial(rule, r)
        yield partial(_check_quantization, r)
        yield partial(_check_mask_replay, config)
        yield partial(_check_adapter_publish, config)
    if isinstance(config, Settings):
        yield partial(_check_reward, config.reward)
        if training:
            yield partial(_check_quantized_samples, config)
            yield partial(_check_dynamic_sampling, config)


def _check_last_port(r: Rollout) -> None:
    if (last := r.port + r.least_servers - 1) > 65535:
        raise UserError(f"rollout.port={r.port}: the last server has port {last}, and 65535 is the largest; lower it")


def _check_routing_replay(r: Rollout) -> None:
    if r.routing_replay and r.name not in ("vllm", "inprocess"):
        raise UserError(
            f"rollout.routing_replay=True needs the experts of each token, and rollout.name={r.name!r} does not"
            " return them; take vllm or inprocess, or set it to False"
        )


def _check_mask_replay(config: Loop) -> None:
    r = config.rollout
    if not r.mask_replay:
        return
    setting = "rollout.mask_replay=True"
    if r.name not in ("vllm", "inprocess"):
        raise UserError(
            f"{setting} needs the kept tokens of each sample, and rollout.name={r.name!r} does not return them; take"
            " vllm or inprocess, or set it to False"
        )
    if not cuts(r):
        raise UserError(
            f"{setting} replays what rollout.top_p, rollout.top_k and rollout.min_p remove, and all are off; set one,"
            " or set it to False"
        )
    if r.top_k > r.mask_replay_tokens:
        raise UserError(
            f"rollout.top_k={r.top_k} keeps more than rollout.mask_replay_tokens={r.mask_replay_tokens}; set"
            f" rollout.mask_replay_tokens={r.top_k}"
        )
    if config.ref.url:
        raise UserError(
            f"{setting} needs the reference's log-probs over the kept tokens, and a served reference (ref.url) gives"
            " them over all; set ref.path, or set it to False"
        )


def _check_temperatures(r: Rollout, training: bool) -> None:
    if training and not r.temperature > 0:
        raise UserError(
            f"rollout.temperature={r.temperature} must be above 0: greedy responses to a prompt are all the same and"
            " have no log-probs to learn from; try 1.0 (a test is greedy by rollout.val_kwargs.temperature=0.0)"
        )
    temperatures = {"rollout.temperature": r.temperature} if training else {}
    temperatures["rollout.val_kwargs.temperature"] = r.val_kwargs.temperature
    for name, value in temperatures.items():
        if r.name == "vllm" and value != 0 and not COLDEST <= value <= HOTTEST:
            raise UserError(
                f"{name}={value}: vLLM samples at temperatures from {COLDEST} to {HOTTEST}; set one of these, or use"
                " rollout.name=inprocess"
            )


def _check_test_sampling(sampling: ValKwargs) -> None:
    if sampling.temperature != 0.0:
        return
    if sampling.n > 1:
        raise UserError(
            f"rollout.val_kwargs.n={sampling.n}: at rollout.val_kwargs.temperature=0.0 all responses to a prompt are"
            " the same; raise the temperature, or set n to 1"
        )
    for name, value in cuts(sampling).items():
        raise UserError(
            f"rollout.val_kwargs.{name}={value}: at rollout.val_kwargs.temperature=0.0 decoding is greedy;"
            f" raise the temperature, or leave {name} out"
        )


def _check_reward(reward: RewardSection) -> None:
    if reward.sandbox == "container" and not reward.sandbox_url:
        raise UserError(
            "reward.sandbox='container' needs the service's address; set reward.sandbox_url=http://HOST:PORT"
        )
    _check_step_scores(reward.model)


def _check_step_scores(m: RewardModel) -> None:
    if not m.step_aggregation:
        return
    setting = f"reward.model.step_aggregation={m.step_aggregation!r}"
    if m.engine == "vllm":
        raise UserError(
            f"reward.model.engine='vllm' scores whole responses; with {setting} set it to jax or transformers"
        )
    for name in ("normalize", "clip"):
        if value := getattr(m, name):
            raise UserError(
                f"reward.model.{name}={value} is for logits, and {setting} gives probabilities; leave it out, and scale"
                " them by reward.weights"
            )
    if not m.step_delimiter:
        raise UserError(
            f"reward.model.step_delimiter='' separates no steps of {setting}; leave it at '\\n\\n', or set a text"
        )


def _check_conversation(r: Rollout) -> None:
    m, name = r.multi_turn, "rollout.multi_turn"
    if r.agent and m.enable:
        raise UserError(
            f"rollout.agent={r.agent!r} and rollout.multi_turn.enable=True would both lead the conversations; set"
            " rollout.multi_turn.enable=False, or leave rollout.agent empty"
        )
    if m.interaction and m.environment:
        raise UserError(
            f"{name}.interaction={m.interaction!r} and {name}.environment={m.environment!r} would both answer the"
            " policy; leave one empty"
        )
    if m.enable and not (m.tool_config_path or m.interaction or m.environment):
        raise UserError(
            f"{name}.enable=True, and nothing answers the policy; set one of {name}.tool_config_path, interaction,"
            " environment"
        )


def _check_history(r: Rollout) -> None:
    """Rejects settings of a conversation's history that nothing would read."""
    form = "rollout.agent_format" if r.agent else "rollout.multi_turn.format"
    plain = (r.agent_format if r.agent else r.multi_turn.format) == "plain"
    for name, is_read in (("history", not plain), ("agent_branches", r.has_branches)):
        value, default = getattr(r, name), PPO[f"rollout.{name}"].default
        if value == default:
            continue
        if not (r.agent or r.multi_turn.enable):
            raise UserError(
                f"rollout.{name}={value!r} is read only with rollout.agent set or rollout.multi_turn.enable=True; set"
                " one of them, or leave it out"
            )
        if not is_read and plain:
            raise UserError(
                f"rollout.{name}={value!r} is read only with a chat template, and {form}='plain' uses none; take"
                f" another format, or leave rollout.{name} at {default!r}"
            )
        if not is_read:
            raise UserError(
                f"rollout.{name}={value!r} limits the trajectories of a conversation, which has one with"
                f" rollout.history={r.history!r}; set that to 'template', or leave rollout.{name} at {default!r}"
            )


def _check_sglang(r: Rollout) -> None:
    if r.name != "sglang":
        return
    for name, value in cuts(r).items():
        raise UserError(
            f"rollout.{name}={value}: rollout.name='sglang' returns log-probs of the whole distribution, not of the"
            f" tokens that are kept; leave {name} out, or use rollout.name=vllm"
        )
    if r.lora_sync == "adapter":
        raise UserError(
            "rollout.lora_sync='adapter' is for rollout.name=vllm; rollout.name='sglang' is given whole weights: take"
            " rollout.lora_sync=merge"
        )
    if r.on_update == "keep":
        raise UserError(
            "rollout.on_update='keep' is for rollout.name=vllm; rollout.name='sglang' reports one version of the"
            " weights for a whole response; take wait or abort"
        )


def _check_async(r: Rollout) -> None:
    if r.mode != "async":
        return
    if r.sleep_level:
        raise UserError(
            f"rollout.sleep_level={r.sleep_level} puts the servers to sleep while the trainer learns, and"
            " rollout.mode='async' samples then; set one of them back"
        )
    if r.name == "inprocess" and (r.on_update != "wait" or r.partial):
        raise UserError(
            f"rollout.on_update={r.on_update!r} with rollout.partial={r.partial}: rollout.name='inprocess' samples"
            " between updates and has no running requests then; leave them at 'wait' and False"
        )
    if r.partial and r.on_update == "wait":
        raise UserError(
            "rollout.partial=True continues responses over updates, and rollout.on_update='wait' waits for their end;"
            " take abort or keep"
        )
    if r.partial and r.max_staleness < 2:
        raise UserError(
            f"rollout.partial=True with rollout.max_staleness={r.max_staleness}: a response that continues in the next"
            " step is two updates old; set it to 2 or more"
        )


def _check_dynamic_sampling(config: Settings) -> None:
    r = config.rollout
    if config.algorithm.filter_groups and r.n < 2:
        raise UserError(
            f"algorithm.filter_groups=True compares the samples of a prompt, and rollout.n={r.n} generates one; raise"
            " rollout.n"
        )
    if config.algorithm.filter_groups and r.mode == "async":
        raise UserError(
            "algorithm.filter_groups=True samples until a step has enough prompts, and rollout.mode='async' requests"
            " its samples before; take rollout.mode=sync"
        )


def _check_adapter_publish(config: Loop) -> None:
    r, rank = config.rollout, config.model.lora_rank
    if r.lora_sync == "merge":
        return
    setting = f"rollout.lora_sync={r.lora_sync!r}"
    if r.name == "inprocess":
        raise UserError(
            f"{setting} sends adapters to a server, and rollout.name='inprocess' samples from the trainer's own; take"
            " rollout.lora_sync=merge, or rollout.name=vllm"
        )
    if r.sleep_level:
        raise UserError(
            f"rollout.sleep_level={r.sleep_level} needs whole weights after each step, and {setting} sends adapters"
            " alone; take merge, or set the level to 0"
        )
    if rank == 0:
        raise UserError(f"{setting} publishes adapters, and model.lora_rank=0 trains none; set it, or take merge")
    if r.on_update == "keep":
        raise UserError(
            f"{setting} with rollout.on_update='keep': a response that the server keeps continues with the old"
            " adapters, reported as the new version; take abort or wait, or rollout.lora_sync=merge"
        )
    if rank > LARGEST_SERVED_RANK:
        raise UserError(
            f"model.lora_rank={rank}: vLLM serves adapters of rank {LARGEST_SERVED_RANK} at most; lower it, or set"
            " rollout.lora_sync=merge"
        )


SECRET = re.compile(r"--(?:[\w.-]*[-_.])?(?:api[-_]key|token|password|secret)(?=[\s=]|$)", re.IGNORECASE)


def publish_via(r: Rollout) -> str:
    """Returns the transport of weights; `auto` is the file's unless a server is at another address."""
    if r.publish_via != "auto":
        return str(r.publish_via)
    return "tcp" if r.name == "vllm" and texts.remote_urls(r.urls) else "file"


def _check_quantization(r: Rollout) -> None:
    if r.quantization == "none":
        return
    setting = f"rollout.quantization={r.quantization!r}"
    if r.name != "vllm":
        raise UserError(f"{setting} is vLLM's, and rollout.name={r.name!r}; take vllm, or set it to none")
    if r.dtype != "bfloat16":
        raise UserError(
            f"{setting} quantises bfloat16 weights, and rollout.dtype={r.dtype!r}; set rollout.dtype=bfloat16"
        )


def _check_quantized_samples(config: Settings) -> None:
    r, old = config.rollout, config.algorithm.old_logprob
    if r.quantization != "none" and old != "correction":
        raise UserError(
            f"rollout.quantization={r.quantization!r} samples from another policy than the trainer's, and"
            f" algorithm.old_logprob={old!r} does not correct that; set algorithm.old_logprob=correction and"
            " algorithm.rollout_is=token, or quantization to none"
        )


def _check_speculation(r: Rollout) -> None:
    min_ps = {"rollout.min_p": r.min_p, "rollout.val_kwargs.min_p": r.val_kwargs.min_p}
    if r.name == "vllm" and "--spec" in r.engine_args and any(min_ps.values()):
        name, value = next(item for item in min_ps.items() if item[1])
        raise UserError(
            f"{name}={value}: vLLM cannot speculate with min_p; set it to 0.0, or remove speculation from"
            f" rollout.engine_args={r.engine_args!r}"
        )


def check_publish(r: Rollout) -> None:
    """Raises a UserError for a transport of weights that the servers do not have."""
    transport = publish_via(r)
    via = f"rollout.publish_via={r.publish_via!r}" + (f" (here {transport})" if r.publish_via == "auto" else "")
    if r.publish_via in ("tcp", "nccl", "ipc") and r.name == "sglang":
        raise UserError(
            f"{via} is for vLLM, and rollout.name='sglang' reads directories; use file and a rollout.publish_dir that"
            " trainer and servers share"
        )
    if r.publish_via == "nccl" and r.sleep_level:
        raise UserError(
            f"{via} needs servers on other GPUs than the trainer's, and rollout.sleep_level={r.sleep_level} is for"
            " servers on the same; use file, or give them rollout.devices and set sleep_level to 0"
        )
    if r.publish_via == "ipc" and r.urls:
        raise UserError(
            f"{via} is for servers that are started here, on the trainer's GPUs; leave rollout.urls empty, or take tcp"
        )
    if r.publish_delta and transport != "tcp":
        raise UserError(f"rollout.publish_delta=True compares weights in host memory, and {via}; set it to tcp")
    if r.publish_host in ("0.0.0.0", "::"):
        raise UserError(
            f"rollout.publish_host={r.publish_host!r} is no address that a server can reach; give the trainer's own"
        )
    away = [url for url in texts.remote_urls(r.urls) if not url.startswith("file:")]
    if transport == "tcp" and away and not r.publish_host:
        raise UserError(
            f"{via} needs the trainer's address for the server at {away[0]}; set rollout.publish_host to the address of"
            " this machine as seen from there"
        )
    if transport != "file" and r.lora_sync == "adapter" and not r.publish_dir:
        raise UserError(
            f"{via} sends whole weights, and rollout.lora_sync='adapter' a folder of adapters; name one that trainer"
            " and servers share by rollout.publish_dir, or take merge"
        )


def check_secrets(config: Loop) -> None:
    """Raises a UserError for secrets, which would be printed and saved, without showing them."""
    r = config.rollout
    place = texts.lookup_place(r.urls)
    urls = [("rollout.urls", url) for url in texts.entries(r.urls) if place is None]
    for name, url in [*urls, *(("ref.url", url) for _, url in texts.sources_and_addresses(config.ref.url))]:
        if re.search("[@?#]", url):
            token = "the servers' token belongs into JPPO_SERVER_TOKEN in the environment"
            remedy = token if name == "rollout.urls" else "leave it out"
            raise UserError(f"{name} has a password or a query in it, and settings are printed and saved; {remedy}")
        if name == "rollout.urls" and not texts.is_url(url):
            raise UserError(f"{name}: {url!r} is no address; write it like http://127.0.0.1:8000")
    texts.addresses_by_source(config.ref.url)
    if len({url.rstrip("/") for url in texts.entries(r.urls)}) < len(texts.entries(r.urls)):
        raise UserError(f"rollout.urls={r.urls!r}: a server is given twice; name it once")
    if match := SECRET.search(r.engine_args):
        raise UserError(
            f"rollout.engine_args has {match[0]}, and settings are printed and saved; leave it out: a server that is"
            " started here has a random token, and other secrets belong in the environment, as HF_TOKEN"
        )
