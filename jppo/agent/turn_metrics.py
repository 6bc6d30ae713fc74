"""The metrics of conversations."""

from collections.abc import Sequence

import numpy as np

from jppo.types import Trajectory


def metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics `agent/...`; empty if no response was a conversation."""
    held = [(t, t.exchange) for t in trajectories if t.exchange is not None]
    if not held:
        return {}
    turns = [sum(one.turns for one in (t, *t.branches)) for t, _ in held]
    calls = sum(e.calls for _, e in held)
    given = [int((~t.sampled[np.argmax(t.sampled) :]).sum()) if t.sampled.any() else 0 for t, _ in held]
    programs = [e.program_s for _, e in held if e.program_s is not None]
    of_programs = {"agent/program_s/mean": float(np.mean(programs))} if programs else {}
    return of_programs | {
        "agent/branches/mean": float(np.mean([1 + len(t.branches) for t, _ in held])),
        "agent/branches_left_out": float(sum(e.branches_left_out for _, e in held)),
        "agent/turns/mean": float(np.mean(turns)),
        "agent/turns/max": float(max(turns)),
        "agent/tool_calls": float(calls),
        "agent/tool_errors": float(sum(e.call_errors for _, e in held)),
        "agent/tool_s/mean": sum(e.call_s for _, e in held) / max(calls, 1),
        "agent/given_tokens/mean": float(np.mean(given)),
        "agent/faults": float(sum(e.fault is not None for _, e in held)),
    }
