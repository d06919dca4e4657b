"""What all modules of broken files share."""

# ruff: noqa: E501, PLR0917 - long sentences and tables

from __future__ import annotations

from collections.abc import Sequence

from conformance.generate.suite import Case, Operation, Suite, verify


def fault(
    suite: Suite,
    slug: str,
    requirements: str,
    data: bytes,
    code: str | tuple[str, ...],
    what: str,
    why: str,
    *,
    how: str = "Made from a valid artifact composed by hand; every digest, size and offset that follows is right.",
    family: str = "",
    level: str = "faulty",
    requires: Sequence[str] = (),
    more: Sequence[Operation] = (),
    limits: Sequence[str] = (),
    ceiling: dict[str, int] | None = None,
) -> None:
    """A broken artifact: ``verify`` gives ``code``; the first requirement names the family."""
    ids = requirements.split()
    suite.add(
        Case(
            family or ids[0][:3].lower(),
            slug,
            level,
            tuple(ids),
            data,
            [verify(code), *more],
            what,
            why,
            how,
            tuple(requires),
            limits=tuple(limits),
            ceiling=ceiling,
        )
    )
