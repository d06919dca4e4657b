"""Context managers that end with ``close``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class ClosedOnExit(ABC):
    """``with`` gives the object itself and closes it in the end."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give back what is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClosedOnExit(ABC):
    """The same for ``async with``."""

    __slots__ = ()

    @abstractmethod
    async def close(self) -> None:
        """Give back what is open."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
