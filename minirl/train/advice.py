"""What helps where little is learned: for the status line of a step, and for the page of a run."""

from __future__ import annotations

from collections.abc import Sequence

LIVE_SHARE = "groups/live_share"
"""Metric: the share of the groups of a step that teach: their rewards differ, and no filter drops
them.
"""
# Steps that are looked at, and the share of their groups that is enough.
_STEPS, _ENOUGH = 10, 1 / 3


def advice(shares: Sequence[float | None]) -> str:
    """Say what helps, most helpful first, where too few groups of the last ten steps were live.

    Args:
        shares: `LIVE_SHARE` of each step; None where it had no group.

    Returns:
        "" where there are enough, and before the tenth step.
    """
    known = [share for share in shares if share is not None][-_STEPS:]
    mean = sum(known) / _STEPS
    if len(known) < _STEPS or mean >= _ENOUGH:
        return ""
    return (
        f"only {100 * mean:.0f} % of the groups of {_STEPS} steps teach: screen the questions "
        "(data.train.pass_rate; for a narrower range where there is one), or else try another "
        "sampler.temperature, a larger train.group_size, a lower train.optimizer.learning_rate"
    )
