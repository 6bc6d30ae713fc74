"""Settings that name steps: '3', '3,5', '2-4'."""

import re

from jppo.errors import UserError


def parse_steps(spec: str, name: str) -> tuple[range, ...]:
    """Parses steps: single ones and ranges with both ends, separated by commas; '' for none."""
    found = []
    for part in (part.strip() for part in spec.split(",")) if spec.strip() else ():
        matched = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if matched is None:
            raise UserError(f"{name}={spec!r}: {part!r} is no step; give steps as in 3, in 3,5 or in 2-4")
        first, last = int(matched[1]), int(matched[2] or matched[1])
        if not 1 <= first <= last:
            raise UserError(f"{name}={spec!r}: {part!r} names no step; the first step is 1, and a range rises, as 2-4")
        found.append(range(first, last + 1))
    return tuple(found)


def check_within(steps: tuple[range, ...], total: int, name: str) -> None:
    """Raises a UserError where a step comes after the last step of the run."""
    last = max((part[-1] for part in steps), default=0)
    if last > total:
        raise UserError(f"{name}: step {last} is none of this run, which has {total}; name steps from 1 to {total}")


def due(step: int, every: int) -> bool:
    """Whether a periodic action is due at `step`; -1 disables it."""
    return every > 0 and step % every == 0
