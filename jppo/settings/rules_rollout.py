"""Rules between the settings of the rollout: sampling, the engine, conversations, servers' addresses and secrets.

Each function yields the texts of errors, one for each rule that the settings break.
"""

import re
from collections.abc import Iterator

from jppo.settings import texts
from jppo.settings.table import PPO, Loop, Settings
from jppo.settings.table_run import RewardModel, RewardSection, Rollout, ValKwargs

CUTS = ("top_p", "top_k", "min_p")  # settings that remove tokens from the distribution
COLDEST, HOTTEST = 0.01, 2.0  # temperatures of vLLM, which raises lower ones to 0.01 with only a log message
LARGEST_SERVED_RANK = 512  # of adapters in vLLM


def cuts(section: Rollout | ValKwargs) -> dict[str, float]:
    """Returns the settings of `CUTS` that a section sets, with their values."""
    return {name: getattr(section, name) for name in CUTS if getattr(section, name) != PPO[f"rollout.{name}"].default}


def rollout_rules(config: Loop, *, training: bool) -> Iterator[Iterator[str]]:
    """Yields the rules between the settings of rollouts: of a training, or of an evaluation."""
    r = config.rollout
    yield _sampling_rules(r, training)
    yield _conversation_rules(r)
    yield _address_rules(config)
    yield _publish_rules(r)
    if training:
        yield _engine_rules(r)
        yield _async_rules(r)
        yield _mask_replay_rules(config)
        yield _adapter_rules(config)
    if isinstance(config, Settings):
        yield _reward_rules(config.reward)
        if training:
            yield _step_rules(config)


def _sampling_rules(r: Rollout, training: bool) -> Iterator[str]:
    """Yields faults of temperatures, and of filters in tests and with speculation."""
    if training and not r.temperature > 0:
        yield (
            f"rollout.temperature={r.temperature} must be above 0: greedy responses to a prompt are all the same and"
            " have no log-probs to learn from; try 1.0 (a test is greedy by rollout.val_kwargs.temperature=0.0)"
        )
    temperatures = {"rollout.temperature": r.temperature} if training else {}
    temperatures["rollout.val_kwargs.temperature"] = r.val_kwargs.temperature
    for name, value in temperatures.items():
        if r.name == "vllm" and value != 0 and not COLDEST <= value <= HOTTEST:
            yield (
                f"{name}={value}: vLLM samples at temperatures from {COLDEST} to {HOTTEST}; set one of these, or use"
                " rollout.name=inprocess"
            )
    if r.val_kwargs.temperature == 0.0 and r.val_kwargs.n > 1:
        yield (
            f"rollout.val_kwargs.n={r.val_kwargs.n}: at rollout.val_kwargs.temperature=0.0 all responses to a prompt"
            " are the same; raise the temperature, or set n to 1"
        )
    for name, value in cuts(r.val_kwargs).items() if r.val_kwargs.temperature == 0.0 else ():
        yield (
            f"rollout.val_kwargs.{name}={value}: at rollout.val_kwargs.temperature=0.0 decoding is greedy;"
            f" raise the temperature, or leave {name} out"
        )
    min_ps = {"rollout.min_p": r.min_p, "rollout.val_kwargs.min_p": r.val_kwargs.min_p}
    for name, value in min_ps.items() if r.name == "vllm" and "--spec" in r.engine_args else ():
        if value:
            yield (
                f"{name}={value}: vLLM cannot speculate with min_p; set it to 0.0, or remove speculation from"
                f" rollout.engine_args={r.engine_args!r}"
            )


def _reward_rules(reward: RewardSection) -> Iterator[str]:
    """Yields faults of the sandbox, and of scores of steps."""
    if reward.sandbox == "container" and not reward.sandbox_url:
        yield "reward.sandbox='container' needs the service's address; set reward.sandbox_url=http://HOST:PORT"
    if reward.model.step_aggregation:
        yield from _step_score_rules(reward.model)


def _step_score_rules(m: RewardModel) -> Iterator[str]:
    """Yields faults of a reward model that scores steps."""
    setting = f"reward.model.step_aggregation={m.step_aggregation!r}"
    if m.engine == "vllm":
        yield f"reward.model.engine='vllm' scores whole responses; with {setting} set it to jax or transformers"
    for name in ("normalize", "clip"):
        if value := getattr(m, name):
            yield (
                f"reward.model.{name}={value} is for logits, and {setting} gives probabilities; leave it out, and scale"
                " them by reward.weights"
            )
    if not m.step_delimiter:
        yield (f"reward.model.step_delimiter='' separates no steps of {setting}; leave it at '\\n\\n', or set a text")


def _conversation_rules(r: Rollout) -> Iterator[str]:
    """Yields faults of conversations, and settings of their history that nothing would read."""
    m, name = r.multi_turn, "rollout.multi_turn"
    if r.agent and m.enable:
        yield (
            f"rollout.agent={r.agent!r} and rollout.multi_turn.enable=True would both lead the conversations; set"
            " rollout.multi_turn.enable=False, or leave rollout.agent empty"
        )
    elif m.interaction and m.environment:
        yield (
            f"{name}.interaction={m.interaction!r} and {name}.environment={m.environment!r} would both answer the"
            " policy; leave one empty"
        )
    elif m.enable and not (m.tool_config_path or m.interaction or m.environment):
        yield (
            f"{name}.enable=True, and nothing answers the policy; set one of {name}.tool_config_path, interaction,"
            " environment"
        )
    form = "rollout.agent_format" if r.agent else "rollout.multi_turn.format"
    plain = (r.agent_format if r.agent else m.format) == "plain"
    for name, is_read in (("history", not plain), ("agent_branches", r.has_branches)):  # else nothing would read them
        value, default = getattr(r, name), PPO[f"rollout.{name}"].default
        if value == default:
            continue
        if not (r.agent or m.enable):
            yield (
                f"rollout.{name}={value!r} is read only with rollout.agent set or rollout.multi_turn.enable=True; set"
                " one of them, or leave it out"
            )
        elif not is_read and plain:
            yield (
                f"rollout.{name}={value!r} is read only with a chat template, and {form}='plain' uses none; take"
                f" another format, or leave rollout.{name} at {default!r}"
            )
        elif not is_read:
            yield (
                f"rollout.{name}={value!r} limits the trajectories of a conversation, which has one with"
                f" rollout.history={r.history!r}; set that to 'template', or leave rollout.{name} at {default!r}"
            )


def _engine_rules(r: Rollout) -> Iterator[str]:
    """Yields settings that the rollout engine does not have."""
    if r.routing_replay and r.name not in ("vllm", "inprocess"):
        yield (
            f"rollout.routing_replay=True needs the experts of each token, and rollout.name={r.name!r} does not"
            " return them; take vllm or inprocess, or set it to False"
        )
    for name, value in cuts(r).items() if r.name == "sglang" else ():
        yield (
            f"rollout.{name}={value}: rollout.name='sglang' returns log-probs of the whole distribution, not of the"
            f" tokens that are kept; leave {name} out, or use rollout.name=vllm"
        )
    if r.name == "sglang" and r.lora_sync == "adapter":
        yield (
            "rollout.lora_sync='adapter' is for rollout.name=vllm; rollout.name='sglang' is given whole weights: take"
            " rollout.lora_sync=merge"
        )
    if r.name == "sglang" and r.on_update == "keep":
        yield (
            "rollout.on_update='keep' is for rollout.name=vllm; rollout.name='sglang' reports one version of the"
            " weights for a whole response; take wait or abort"
        )
    setting = f"rollout.quantization={r.quantization!r}"
    if r.quantization != "none" and r.name != "vllm":
        yield f"{setting} is vLLM's, and rollout.name={r.name!r}; take vllm, or set it to none"
    elif r.quantization != "none" and r.dtype != "bfloat16":
        yield f"{setting} quantises bfloat16 weights, and rollout.dtype={r.dtype!r}; set rollout.dtype=bfloat16"


def _async_rules(r: Rollout) -> Iterator[str]:
    """Yields settings that asynchronous sampling excludes."""
    if r.mode != "async":
        return
    if r.sleep_level:
        yield (
            f"rollout.sleep_level={r.sleep_level} puts the servers to sleep while the trainer learns, and"
            " rollout.mode='async' samples then; set one of them back"
        )
    if r.name == "inprocess" and (r.on_update != "wait" or r.partial):
        yield (
            f"rollout.on_update={r.on_update!r} with rollout.partial={r.partial}: rollout.name='inprocess' samples"
            " between updates and has no running requests then; leave them at 'wait' and False"
        )
    elif r.partial and r.on_update == "wait":
        yield (
            "rollout.partial=True continues responses over updates, and rollout.on_update='wait' waits for their end;"
            " take abort or keep"
        )
    elif r.partial and r.max_staleness < 2:
        yield (
            f"rollout.partial=True with rollout.max_staleness={r.max_staleness}: a response that continues in the next"
            " step is two updates old; set it to 2 or more"
        )


def _mask_replay_rules(config: Loop) -> Iterator[str]:
    """Yields settings with which no kept tokens are replayed."""
    r, setting = config.rollout, "rollout.mask_replay=True"
    if not r.mask_replay:
        return
    if r.name not in ("vllm", "inprocess"):
        yield (
            f"{setting} needs the kept tokens of each sample, and rollout.name={r.name!r} does not return them; take"
            " vllm or inprocess, or set it to False"
        )
    if not cuts(r):
        yield (
            f"{setting} replays what rollout.top_p, rollout.top_k and rollout.min_p remove, and all are off; set one,"
            " or set it to False"
        )
    if r.top_k > r.mask_replay_tokens:
        yield (
            f"rollout.top_k={r.top_k} keeps more than rollout.mask_replay_tokens={r.mask_replay_tokens}; set"
            f" rollout.mask_replay_tokens={r.top_k}"
        )
    if config.ref.url:
        yield (
            f"{setting} needs the reference's log-probs over the kept tokens, and a served reference (ref.url) gives"
            " them over all; set ref.path, or set it to False"
        )


def _adapter_rules(config: Loop) -> Iterator[str]:
    """Yields settings with which adapters cannot be published alone."""
    r, rank = config.rollout, config.model.lora_rank
    setting = f"rollout.lora_sync={r.lora_sync!r}"
    if r.lora_sync == "merge":
        return
    if r.name == "inprocess":
        yield (
            f"{setting} sends adapters to a server, and rollout.name='inprocess' samples from the trainer's own; take"
            " rollout.lora_sync=merge, or rollout.name=vllm"
        )
    if r.sleep_level:
        yield (
            f"rollout.sleep_level={r.sleep_level} needs whole weights after each step, and {setting} sends adapters"
            " alone; take merge, or set the level to 0"
        )
    if rank == 0:
        yield f"{setting} publishes adapters, and model.lora_rank=0 trains none; set it, or take merge"
    if r.on_update == "keep":
        yield (
            f"{setting} with rollout.on_update='keep': a response that the server keeps continues with the old"
            " adapters, reported as the new version; take abort or wait, or rollout.lora_sync=merge"
        )
    if rank > LARGEST_SERVED_RANK:
        yield (
            f"model.lora_rank={rank}: vLLM serves adapters of rank {LARGEST_SERVED_RANK} at most; lower it, or set"
            " rollout.lora_sync=merge"
        )


def _step_rules(config: Settings) -> Iterator[str]:
    """Yields faults of the samples of a step."""
    r, old = config.rollout, config.algorithm.old_logprob
    if r.quantization != "none" and old != "correction":
        yield (
            f"rollout.quantization={r.quantization!r} samples from another policy than the trainer's, and"
            f" algorithm.old_logprob={old!r} does not correct that; set algorithm.old_logprob=correction and"
            " algorithm.rollout_is=token, or quantization to none"
        )
    if config.algorithm.filter_groups and r.n < 2:
        yield (
            f"algorithm.filter_groups=True compares the samples of a prompt, and rollout.n={r.n} generates one; raise"
            " rollout.n"
        )
    if config.algorithm.filter_groups and r.mode == "async":
        yield (
            "algorithm.filter_groups=True samples until a step has enough prompts, and rollout.mode='async' requests"
            " its samples before; take rollout.mode=sync"
        )


def publish_via(r: Rollout) -> str:
    """Returns the transport of weights; `auto` is the file's unless a server is at another address."""
    if r.publish_via != "auto":
        return str(r.publish_via)
    return "tcp" if r.name == "vllm" and texts.remote_urls(r.urls) else "file"


def _publish_rules(r: Rollout) -> Iterator[str]:
    """Yields what speaks against a transport of weights that the servers do not have."""
    transport = publish_via(r)
    via = f"rollout.publish_via={r.publish_via!r}" + (f" (here {transport})" if r.publish_via == "auto" else "")
    if r.publish_via in ("tcp", "nccl", "ipc") and r.name == "sglang":
        yield (
            f"{via} is for vLLM, and rollout.name='sglang' reads directories; use file and a rollout.publish_dir that"
            " trainer and servers share"
        )
    if r.publish_via == "nccl" and r.sleep_level:
        yield (
            f"{via} needs servers on other GPUs than the trainer's, and rollout.sleep_level={r.sleep_level} is for"
            " servers on the same; use file, or give them rollout.devices and set sleep_level to 0"
        )
    if r.publish_via == "ipc" and r.urls:
        yield (
            f"{via} is for servers that are started here, on the trainer's GPUs; leave rollout.urls empty, or take tcp"
        )
    if r.publish_delta and transport != "tcp":
        yield f"rollout.publish_delta=True compares weights in host memory, and {via}; set it to tcp"
    if r.publish_host in ("0.0.0.0", "::"):
        yield f"rollout.publish_host={r.publish_host!r} is no address that a server can reach; give the trainer's own"
    away = [url for url in texts.remote_urls(r.urls) if not url.startswith("file:")]
    if transport == "tcp" and away and not r.publish_host:
        yield (
            f"{via} needs the trainer's address for the server at {away[0]}; set rollout.publish_host to the address of"
            " this machine as seen from there"
        )
    if transport != "file" and r.lora_sync == "adapter" and not r.publish_dir:
        yield (
            f"{via} sends whole weights, and rollout.lora_sync='adapter' a folder of adapters; name one that trainer"
            " and servers share by rollout.publish_dir, or take merge"
        )


SECRET = re.compile(r"--(?:[\w.-]*[-_.])?(?:api[-_]key|token|password|secret)(?=[\s=]|$)", re.IGNORECASE)


def _address_rules(config: Loop) -> Iterator[str]:
    """Yields faults of addresses and ports; secrets, which would be printed and saved, are not shown."""
    r = config.rollout
    if (last := r.port + r.least_servers - 1) > 65535:
        yield f"rollout.port={r.port}: the last server has port {last}, and 65535 is the largest; lower it"
    place = texts.lookup_place(r.urls)
    urls = [("rollout.urls", url) for url in texts.entries(r.urls) if place is None]
    for name, url in [*urls, *(("ref.url", url) for _, url in texts.sources_and_addresses(config.ref.url))]:
        if re.search("[@?#]", url):
            token = "the servers' token belongs into JPPO_SERVER_TOKEN in the environment"
            remedy = token if name == "rollout.urls" else "leave it out"
            yield f"{name} has a password or a query in it, and settings are printed and saved; {remedy}"
            return  # other errors would show it
        if name == "rollout.urls" and not texts.is_url(url):
            yield f"{name}: {url!r} is no address; write it like http://127.0.0.1:8000"
    if match := SECRET.search(r.engine_args):
        yield (
            f"rollout.engine_args has {match[0]}, and settings are printed and saved; leave it out: a server that is"
            " started here has a random token, and other secrets belong in the environment, as HF_TOKEN"
        )
    if len({url.rstrip("/") for url in texts.entries(r.urls)}) < len(texts.entries(r.urls)):
        yield f"rollout.urls={r.urls!r}: a server is given twice; name it once"
    texts.addresses_by_source(config.ref.url)
