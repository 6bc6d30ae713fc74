"""The sandbox that `reward.sandbox` selects."""

import functools
from collections.abc import Callable

from jppo.sandbox import launcher, service
from jppo.sandbox.protections import BASIC, CONTAINER, STRICT, lacks, probe, summary

Runner = Callable[..., launcher.Ran]  # as launcher.run, without its `guards`


def make_runner(mode: str = STRICT, url: str = "") -> Runner:
    """Makes the function that runs programs; ValueError if `strict` lacks a protection, or the service an address."""
    if mode == CONTAINER:
        return functools.partial(service.run, url=service.check_url(url))
    guards = probe()
    if mode == STRICT and (why := lacks(guards)):
        raise ValueError(
            f"reward.sandbox='strict': {why}; start where they are, set reward.sandbox=container with"
            " reward.sandbox_url, or, for a model that you trust, reward.sandbox=basic"
        )
    return functools.partial(launcher.run, guards=guards)


def describe_sandbox(mode: str, url: str = "") -> str:
    """Describes where programs run, and under which protections, for the start of a run's log."""
    if mode == CONTAINER:
        return f"sandbox: container, by {url}"
    guards = probe()
    lacking = lacks(guards)
    warning = f"; WARNING: programs are not contained: {lacking}" if mode == BASIC and lacking else ""
    return f"sandbox: {mode}, {summary(guards)}{warning}"
