"""The devices of a run of verl's: its mesh, hosts and servers, and how often samplers and trainer meet."""

import math

from jppo.verl.name import Look, Unfit

_HOST = 8  # devices of a host, at least
MEGATRON = ("megatron", "mindspeed")


def engine(look: Look) -> str:
    """Returns the training engine: fsdp, megatron, veomni or torchtitan."""
    for name in (look("model_engine"), look("A.strategy")):
        if name in (*MEGATRON, "veomni", "torchtitan"):
            return "megatron" if name in MEGATRON else str(name)
    return "fsdp"


def world(look: Look) -> int:
    """Returns the trainer's devices."""
    return int((look("trainer.nnodes") or 1) * (look("trainer.n_gpus_per_node") or 1))


def sequence(look: Look) -> int:
    return int(look("A.ulysses_sequence_parallel_size") or 1)


def tensor(look: Look) -> int:
    return int(look("A.megatron.tensor_model_parallel_size") or 1)


def _rest(look: Look) -> int:
    return max(1, world(look) // (sequence(look) * tensor(look)))


def expert(look: Look) -> int:
    """Returns the size of `mesh.expert`; verl's experts share the devices of data, sequence and tensor."""
    return math.gcd(int(look("A.megatron.expert_model_parallel_size") or 1), _rest(look))


def sharing(look: Look) -> int:
    """Returns the devices that share verl's parameters, beside those that share rows."""
    size = look("A.torchtitan.data_parallel_shard_size") if engine(look) == "torchtitan" else None
    size = look("A.fsdp_config.fsdp_size") if size is None else size * sequence(look)
    if engine(look) == "megatron" or size < 0 or size >= world(look):
        return _rest(look) // expert(look)
    return int(max(1, size // (sequence(look) * expert(look))))


def fsdp(look: Look) -> int:
    """Returns the size of `mesh.fsdp`: a power of two, for the width of a model must be a multiple; -1 is all."""
    size = sharing(look) & -sharing(look)
    return -1 if size * expert(look) == _rest(look) else size


def shared(value: int, look: Look) -> int:
    """Returns the number of hosts or of their devices; raises Unfit if not all can share the parameters."""
    size = sharing(look)
    if value & (value - 1) and size & (size - 1):
        raise Unfit(f"{size & -size} of {size} devices share the parameters: {size} must divide a model's width")
    return value


def data(look: Look) -> int:
    return 1 if fsdp(look) == -1 else -1


def apart(look: Look) -> bool:
    """Whether the samplers have devices of their own."""
    return bool(look("rollout.nnodes") or look("R.nnodes"))


def _sampling(look: Look) -> int:
    """Returns the devices of one of verl's hosts that sample."""
    place = "rollout" if look("rollout.nnodes") else "R"
    own = look(f"{place}.n_gpus_per_node") if apart(look) else None
    return int(own or look("trainer.n_gpus_per_node") or 1)


def group(look: Look) -> int:
    """Returns the devices of a server, which are on one host."""
    return min(int(look("R.tensor_model_parallel_size") or 1), _sampling(look))


def hosts(look: Look) -> tuple[int, int, int]:
    """Returns the hosts of the run, and of each the devices that train and those that sample, which may be the same."""
    nodes, trains = int(look("trainer.nnodes") or 1), int(look("trainer.n_gpus_per_node") or 1)
    if not apart(look):
        return nodes, trains, trains
    samples = int((look("rollout.nnodes") or look("R.nnodes")) * _sampling(look))
    all_train, most = nodes * trains, max(_HOST, trains)
    for count in range(-(-(all_train + samples) // most), all_train + 1):
        if all_train % count == 0 and samples % count == 0 and (samples // count) % group(look) == 0:
            return count, all_train // count, samples // count
    raise Unfit(f"{samples} devices that sample beside {all_train} that train do not fit hosts of {most}")


def servers(look: Look) -> int:
    return max(1, hosts(look)[2] // group(look))


def devices(look: Look) -> str | None:
    """Returns the devices of a host that sample, where they do not train."""
    _, train, sample = hosts(look)
    return ",".join(map(str, range(train, train + sample))) if apart(look) else None


def fully(look: Look) -> bool:
    """Whether the trainer is verl's fully asynchronous one."""
    return look("async_training.trigger_parameter_sync_step") is not None


def asynchronous(look: Look) -> bool:
    return bool(fully(look) or look("rollout.nnodes") or look("trainer.v1.trainer_mode") != "sync")


def meetings(look: Look) -> int:
    """Returns the updates of verl's between two publishes; jppo publishes after each step."""
    if fully(look):
        return int(look("async_training.trigger_parameter_sync_step") or 1)
    return (
        int(look("trainer.v1.separate_async.parameter_sync_step"))
        if look("trainer.v1.trainer_mode") == "separate_async"
        else 1
    )


def batch(look: Look) -> int:
    """Returns the prompts between two publishes."""
    if fully(look):
        required = look("A.ppo_mini_batch_size") * (look("async_training.require_batches") or 1)
        return int(required * meetings(look))
    return int(look("data.train_batch_size") * meetings(look))


def steps(look: Look) -> int | None:
    """Returns the steps of a run, if they are given."""
    total = look("trainer.total_training_steps")
    if fully(look) and not total:
        prompts = look("rollout.total_rollout_steps")
        return None if not prompts else max(1, int(prompts) // batch(look))
    return -1 if not total or total < 0 else max(1, int(total) // (1 if fully(look) else meetings(look)))


def staleness(look: Look) -> int | None:
    """Returns the publishes that a sample may be old."""
    if not asynchronous(look):
        return None
    return math.ceil(look("async_training.staleness_threshold") or 0) if fully(look) else 1


def on_update(look: Look) -> str | None:
    """Returns what becomes of unfinished responses at a publish."""
    spans = look("trainer.v1.trainer_mode") == "separate_async"
    spans = spans or bool(fully(look) and look("async_training.partial_rollout") and staleness(look))
    return "abort" if spans else "wait" if asynchronous(look) else None


def reference_offload(look: Look) -> bool | None:
    """Returns the reference's offload where it follows from the actor's."""
    follows = engine(look) in ("megatron", "veomni") and look("REF.fsdp_config.param_offload") is None
    return bool(look("A.fsdp_config.param_offload")) if follows else None
