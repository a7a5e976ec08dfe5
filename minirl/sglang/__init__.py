"""Rollouts from SGLang servers: client, pool, weight transfer, processes. Here are the names of
their metrics, which are read without what talks to servers.
"""

from typing import Literal, get_args

Failure = Literal["connection", "deadline", "status", "garbage", "stale"]
"""How a server fails."""
_COUNTED = ("requests", "retries", "left_out", "taken_back", "restarted")
EVENTS = tuple(f"sglang/{n}" for n in (*_COUNTED, *(f"failed_{k}" for k in get_args(Failure))))
"""Metrics that are counts, which add up over processes."""
IN_USE = "sglang/servers"
