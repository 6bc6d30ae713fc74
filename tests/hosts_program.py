"""A training as one of several hosts, which may be told to break: python hosts_program.py HOW ARGUMENTS-OF-TRAIN

HOW is 'whole', or WHAT@HOST: what host number HOST does in its third step, or at its start.
"""

import os
import signal
import sys

from jppo import train
from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError
from jppo.run import start as opened
from jppo.run import trained_model
from jppo.samples.queue import SampleQueue

what, _, host = sys.argv[1].partition("@")
take, ask, read, write = SampleQueue.take, SampleQueue._take_groups, opened.read_inputs, trained_model.write_model


def taking(supply, step):
    """In the trainer's thread, but in no agreement."""
    if step == 2:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "crash":
            raise KeyError("nobody expects this")
        if what == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
    return take(supply, step)


def asking(supply, step):
    """Where the host is by itself."""
    if step == 2 and what == "rollout":
        raise RolloutError("the server is gone for good")
    if step == 1 and what == "behind":
        supply._request_steps = behind
    return ask(supply, step)


def behind(last, version):
    """Between two statements of a step's samples."""
    raise RolloutError("the server is gone for good")


def reading(c):
    """Before anything is started."""
    if what == "user":
        raise UserError("this host has no such file")
    return read(c)


def writing(c, learner, path, now, **how):
    """In a checkpoint; the others have written theirs, or take part."""
    write(c, learner, path, now, **how)
    if what == "export" and "checkpoints" in str(path) and int(now.step) == 2:
        raise OSError("there is no room on this host")


if what != "whole" and os.environ["NODE_RANK"] == host:
    SampleQueue.take, SampleQueue._take_groups, opened.read_inputs = taking, asking, reading
    train.write_model = trained_model.write_model = writing
train.main(sys.argv[2:])
