"""Needle retrieval: codes hidden in a long text at several depths, asked for from one cache.

All needles lie in the same context, each with a name of its own, so one prefill and one round
trip of the cache answer for all depths. The others are distractors.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvformat.errors import UsageError

NAMES: Final = (
    "bridge", "garden", "castle", "harbour", "library", "museum", "bakery", "stadium",
    "airport", "theatre", "hospital", "factory", "school", "market", "chapel", "tower",
    "tunnel", "palace", "prison", "station", "cottage", "embassy", "farm", "fountain",
    "gallery", "hotel", "island", "lighthouse", "mill", "office", "pharmacy", "quarry",
)  # fmt: skip
DIGITS: Final = 5
SEED: Final = 1
Tokenise = Callable[[str], list[int]]


class Reads(Protocol):
    """What is needed of a model."""

    def log_probs(self, ids: Sequence[int], cache: Any) -> Any:
        """Log probabilities ``[T, V]`` behind each of ``ids``."""


@dataclass(frozen=True, slots=True)
class Needle:
    """One code: how deep it lies (0 the start, 1 the end), the question and the answer's tokens."""

    depth: float
    question: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Haystack:
    """Token ids of the whole context, and what is hidden in them."""

    ids: tuple[int, ...]
    needles: tuple[Needle, ...]


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Whether the answer is the likeliest continuation, and its surprise in nats per token."""

    depth: float
    retrieved: bool
    answer_nats: float


def make_haystack(
    tokenise: Tokenise, filler: Sequence[int], context: int, depths: int, start: Sequence[int] = ()
) -> Haystack:
    """A context of ``context`` tokens, question and answer included, with ``depths`` needles.

    ``filler`` is repeated as often as needed, ``start`` stands in front (a token that begins every
    text). Raises ``usage.argument`` where the context is too short or there are too many depths.
    """
    if not 1 <= depths <= len(NAMES):
        raise UsageError(
            "usage.argument", "so many depths are not possible", expected=f"1 to {len(NAMES)}",
            found=depths,
        )  # fmt: skip
    numbers = random.Random(SEED)  # noqa: S311 - the same haystack every time, no secret
    parts: list[list[int]] = []
    needles: list[Needle] = []
    for number, name in enumerate(NAMES[:depths]):
        code = "".join(str(numbers.randrange(10)) for _ in range(DIGITS))
        ask = tokenise(f"The code of the {name} is")
        answer = tokenise(f" {code}")
        parts.append([*tokenise("\n"), *ask, *answer, *tokenise(".\n")])
        question = [*tokenise(f"\nWhat is the code of the {name}? "), *ask]
        depth = number / (depths - 1) if depths > 1 else 0.5
        needles.append(Needle(depth, tuple(question), tuple(answer)))
    room = max(len(item.question) + len(item.answer) for item in needles)
    hay = context - room - len(start) - sum(len(part) for part in parts)
    if hay < 16 * depths or not filler:
        raise UsageError(
            "usage.argument",
            "the context is too short for the needles",
            expected=f"at least {context - hay + 16 * depths} tokens",
            found=context,
            next_step="Give a larger --context, or --no-needle",
        )
    ids = [*start]
    done = 0
    for part, needle in zip(parts, needles, strict=True):
        stop = round(needle.depth * hay)
        ids += [filler[place % len(filler)] for place in range(done, stop)]
        ids += part
        done = stop
    ids += [filler[place % len(filler)] for place in range(done, hay)]
    return Haystack(tuple(ids), tuple(needles))


def ask_all(reader: Reads, cache: Any, haystack: Haystack) -> list[Retrieval]:
    """Ask for every needle; ``cache`` holds the haystack and stays as it is."""
    return [_ask(reader, copy.deepcopy(cache), needle) for needle in haystack.needles]


def _ask(reader: Reads, cache: Any, needle: Needle) -> Retrieval:
    asked = [*needle.question, *needle.answer[:-1]]
    found = reader.log_probs(asked, cache)[len(needle.question) - 1 :]
    likeliest = [int(token) for token in found.argmax(-1)]
    surprise = [-float(row[token]) for row, token in zip(found, needle.answer, strict=True)]
    return Retrieval(needle.depth, likeliest == list(needle.answer), sum(surprise) / len(surprise))
