"""Parcels of new weights on their way from the learner to the servers of its process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from minirl.sglang.client import ServerError
from minirl.sglang.transfer import Again, Parcel


class Belt:
    """Brings parcels to several servers, each at its own pace; two at most are on their way.

    Of one event loop.
    """

    def __init__(self) -> None:
        self._lines: list[asyncio.Queue[Parcel | None]] = []
        self._missing, self._is_open = 0, asyncio.Event()

    def expect(self, count: int) -> None:
        """Keep the first parcel until so many lines are there."""
        self._missing = count
        if not count:
            self._is_open.set()

    @asynccontextmanager
    async def line(self) -> AsyncGenerator[AsyncIterator[Parcel]]:
        """Give the parcels for one server, until it wants no more."""
        line: asyncio.Queue[Parcel | None] = asyncio.Queue(1)
        self._lines.append(line)
        if len(self._lines) == self._missing:
            self._is_open.set()
        try:
            yield _until_none(line)
        finally:
            self._lines.remove(line)
            while not line.empty():  # `put` may wait for room
                line.get_nowait()

    async def put(self, parcel: Parcel | None) -> None:
        """Bring a parcel to all that still take them; None after the last."""
        await self._is_open.wait()
        for line in list(self._lines):
            if line in self._lines:
                await line.put(parcel)


async def _until_none(line: asyncio.Queue[Parcel | None]) -> AsyncIterator[Parcel]:
    while (parcel := await line.get()) is not None:
        yield parcel


async def once_more(again: Again | None) -> AsyncIterator[Parcel]:
    """Make the parcels of weights for one server, one at a time.

    Raises:
        ServerError: The weights are gone.
    """
    if again is None:
        raise ServerError("stale", "has missed weights that come to all together")
    try:
        parcels = await asyncio.to_thread(again)
        following: Callable[[], Parcel | None] = lambda: next(parcels, None)  # noqa: E731
        while (parcel := await asyncio.to_thread(following)) is not None:
            yield parcel
    except RuntimeError as error:
        # The learner has overwritten them; it will bring the next ones.
        raise ServerError("stale", f"has missed weights that are gone ({error})") from None
