"""The metrics of conversations."""

from collections.abc import Sequence

import numpy as np

from jppo.types import Trajectory


def metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics `agent/...`; empty if no response was a conversation."""
    held = [(t, t.exchange) for t in trajectories if t.exchange is not None]
    if not held:
        return {}
    turns = [t.turns for t, _ in held]
    calls = sum(e.calls for _, e in held)
    given = [int((~t.sampled[np.argmax(t.sampled) :]).sum()) for t, _ in held]
    programs = [(e.program_s, 1 + len(t.branches), e.branches_left_out) for t, e in held if e.program_s is not None]
    seconds, branches, left_out = zip(*programs, strict=True) if programs else ((), (), ())
    of_programs = (
        {
            "agent/program_s/mean": float(np.mean(seconds)),
            "agent/branches/mean": float(np.mean(branches)),
            "agent/branches_left_out": float(sum(left_out)),
        }
        if programs
        else {}
    )
    return of_programs | {
        "agent/turns/mean": float(np.mean(turns)),
        "agent/turns/max": float(max(turns)),
        "agent/tool_calls": float(calls),
        "agent/tool_errors": float(sum(e.call_errors for _, e in held)),
        "agent/tool_s/mean": sum(e.call_s for _, e in held) / max(calls, 1),
        "agent/given_tokens/mean": float(np.mean(given)),
        "agent/faults": float(sum(e.fault is not None for _, e in held)),
    }
