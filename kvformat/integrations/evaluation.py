"""What a restored cache does to a model's output (design: quality is measured by the model).

The model reads the text behind the cached tokens on the original cache once, and on each restored
one; all comparisons are with that one reference, in the model's dtype, float32 by default. The
first prediction compared is that behind the first following token: the one before it was made
when the cache was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvformat.errors import UsageError
from kvformat.integrations.model_runs import CHUNK, Runner
from kvformat.integrations.needle import Haystack, Retrieval, ask_all, make_haystack
from kvformat.measured import Measurement

FP8: Final = "fp8 e4m3fn"
ATTENTION_TOKENS: Final = 64

Step = Callable[[int, int], None]
Rounded = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to store a cache.

    ``start()`` gives a new cache of the artifact's tokens, restored. ``again(cache, ids)`` sends a
    cache of ``ids`` through the method once more and gives a new one; None where that is not
    possible here, and ``reason`` says why. Both caches are placed for the model.
    """

    name: str
    bits_per_value: float
    start: Callable[[], Any]
    again: Callable[[Any, Sequence[int]], Any] | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """How much is measured; each part costs about as much as its tokens.

    ``tokens`` are compared, ``greedy`` generated, ``turns`` made of the compared ones. ``context``
    is the length of the needle test, None for the model's own; ``depths`` 0 leaves it out.
    """

    tokens: int = 1000
    greedy: int = 64
    turns: int = 3
    depths: int = 5
    context: int | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """In nats per token; ``top1`` is the share of tokens with the same likeliest successor."""

    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float
    cross_entropy_change: float


@dataclass(frozen=True, slots=True)
class LayerError:
    """Root mean square of the error over that of the original: rows held, attention output."""

    layer: int
    key: float
    value: float
    attention: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Mean KL of a turn whose cache was stored in every turn, and of one stored only now."""

    tokens: int
    kl_mean: float
    kl_once: float


@dataclass(frozen=True, slots=True)
class MethodResult:
    """All that was measured of one method; empty lists for what was left out."""

    name: str
    bits_per_value: float
    divergence: Divergence
    greedy_same: int
    layers: list[LayerError]
    turns: list[Turn]
    needle: list[Retrieval]
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of all methods, beside the original's own."""

    cached_tokens: int
    compared_tokens: int
    cross_entropy: float
    greedy_tokens: int
    context_tokens: int
    needle: list[Retrieval]
    methods: list[MethodResult] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As JSON, divergences in nats per token."""
        return asdict(self)

    def measurement(self, result: MethodResult, model: str, content_id: str) -> Measurement:
        """What an artifact can state of a track (``kvformat.measured``)."""
        return Measurement(
            track=result.name,
            model=model,
            content_id=content_id,
            cached_tokens=self.cached_tokens,
            compared_tokens=self.compared_tokens,
            **asdict(result.divergence),
        )


@dataclass(frozen=True, slots=True)
class _Reference:
    """Everything about the original that methods are compared with."""

    cache: Any
    log_probs: torch.Tensor
    boundaries: list[Any]
    greedy: list[int]
    attention_in: dict[int, torch.Tensor]
    attention_out: dict[int, torch.Tensor]
    haystack: Haystack | None
    hay_cache: Any
    needle: list[Retrieval]


class _Evaluator:
    def __init__(
        self, runner: Runner, ids: Sequence[int], cached: int, options: Options, rounded: Rounded
    ) -> None:
        self.runner = runner
        self.rounded = rounded
        self.ids = list(ids)
        self.cached = cached
        self.options = options
        self.tokens = min(options.tokens, len(self.ids) - cached - 1)
        if self.tokens < 2:
            raise UsageError(
                "usage.argument",
                "too few tokens follow those of the cache",
                expected=f"a text of at least {cached + 3:,} tokens",
                found=f"{len(self.ids):,}",
                next_step="Give a longer text: it begins with the cached tokens",
            )
        self.following = self.ids[cached : cached + self.tokens]
        self.targets = torch.tensor(self.ids[cached + 1 : cached + self.tokens + 1])
        self.turns = min(options.turns, self.tokens // 2)
        self.greedy = options.greedy

    def pieces(self, turn: int) -> Iterator[slice]:
        """The forward passes over the tokens of one turn, alike for all methods."""
        count = max(1, self.turns)
        first, last = (self.tokens * number // count for number in (turn, turn + 1))
        for start in range(first, last, CHUNK):
            yield slice(start, min(start + CHUNK, last))

    def reference(self, cache: Any, haystack: Haystack | None) -> _Reference:
        runner = self.runner
        greedy = runner.greedy(self.following[0], copy.deepcopy(cache), self.greedy)
        inputs, outputs = runner.attention_outputs(
            self.following[:ATTENTION_TOKENS], copy.deepcopy(cache)
        )
        running = copy.deepcopy(cache)
        parts, boundaries = [], []
        for turn in range(max(1, self.turns)):
            running = self.rounded(running) if turn else running
            boundaries.append(copy.deepcopy(running))
            parts += [
                runner.log_probs(self.following[piece], running).cpu()
                for piece in self.pieces(turn)
            ]
        hay_cache = None if haystack is None else self.rounded(runner.prefill(haystack.ids))
        needle = [] if haystack is None else ask_all(runner, hay_cache, haystack)
        return _Reference(
            cache,
            torch.cat(parts),
            boundaries,
            greedy,
            inputs,
            outputs,
            haystack,
            hay_cache,
            needle,
        )

    def result(self, method: Method, reference: _Reference) -> MethodResult:
        cache = method.start()
        layers = self.layer_errors(cache, reference)
        greedy = self.runner.greedy(self.following[0], copy.deepcopy(cache), self.greedy)
        divergence = self.divergence(cache, reference)
        able = method.again is not None
        return MethodResult(
            method.name,
            method.bits_per_value,
            divergence,
            _common(greedy, reference.greedy),
            layers,
            self.lossy_turns(method, reference) if able else [],
            self.needle(method, reference) if able else [],
            method.reason,
        )

    def divergence(self, cache: Any, reference: _Reference) -> Divergence:
        kl, same, surprise = [], [], []
        for turn in range(max(1, self.turns)):
            cache = self.rounded(cache) if turn else cache
            for piece in self.pieces(turn):
                p = reference.log_probs[piece]
                q = self.runner.log_probs(self.following[piece], cache).cpu()
                kl.append(_kl(p, q))
                same.append((p.argmax(-1) == q.argmax(-1)).numpy())
                target = self.targets[piece, None]
                surprise.append((p.gather(1, target) - q.gather(1, target))[:, 0].double().numpy())
        values = np.concatenate(kl)
        return Divergence(
            float(values.mean()),
            float(np.quantile(values, 0.99)),
            float(values.max()),
            float(np.concatenate(same).mean()),
            float(np.concatenate(surprise).mean()),
        )

    def layer_errors(self, cache: Any, reference: _Reference) -> list[LayerError]:
        found: dict[int, tuple[float, float]] = {}
        for number, (mine, theirs) in enumerate(
            zip(cache.layers, reference.cache.layers, strict=True)
        ):
            if mine.is_initialized:
                found[number] = (
                    _relative(mine.keys, theirs.keys),
                    _relative(mine.values, theirs.values),
                )
        _, out = self.runner.attention_outputs(
            self.following[:ATTENTION_TOKENS], copy.deepcopy(cache), reference.attention_in
        )
        return [
            LayerError(number, *rows, _relative(out[number], reference.attention_out[number]))
            for number, rows in found.items()
            if number in out
        ]

    def lossy_turns(self, method: Method, reference: _Reference) -> list[Turn]:
        """Each turn the cache is stored, restored, and read on by the turn's tokens."""
        if method.again is None or self.turns < 2:
            return []
        cache = method.start()
        result = []
        for turn in range(self.turns):
            pieces = list(self.pieces(turn))
            held = self.ids[: self.cached + pieces[0].start]
            once = None
            if turn:
                cache = method.again(cache, held)
                once = method.again(copy.deepcopy(reference.boundaries[turn]), held)
            kl = self._kl_of(cache, pieces, reference)
            kl_once = kl if once is None else self._kl_of(once, pieces, reference)
            result.append(Turn(pieces[-1].stop - pieces[0].start, kl, kl_once))
        return result

    def _kl_of(self, cache: Any, pieces: Sequence[slice], reference: _Reference) -> float:
        found = [
            _kl(
                reference.log_probs[piece],
                self.runner.log_probs(self.following[piece], cache).cpu(),
            )
            for piece in pieces
        ]
        return float(np.concatenate(found).mean())

    def needle(self, method: Method, reference: _Reference) -> list[Retrieval]:
        if method.again is None or reference.haystack is None:
            return []
        cache = method.again(copy.deepcopy(reference.hay_cache), reference.haystack.ids)
        return ask_all(self.runner, cache, reference.haystack)

    def cross_entropy(self, reference: _Reference) -> float:
        return -float(reference.log_probs.gather(1, self.targets[:, None]).double().mean())


def evaluate(
    runner: Runner,
    ids: Sequence[int],
    original: Any,
    methods: Sequence[Method],
    options: Options,
    *,
    cached: int,
    haystack: Haystack | None = None,
    rounded: Rounded = lambda cache: cache,
    progress: Step | None = None,
) -> Evaluation:
    """Compare ``methods`` with the ``original`` cache of the first ``cached`` of ``ids``.

    ``original`` is placed for the model; it is not changed. ``rounded`` brings a cache that the
    model has read on to the precision in which an engine holds it; that happens between turns and
    is no error of a method. Raises ``usage.argument`` where the
    text behind the cache is too short, and what the methods raise.
    """
    work = _Evaluator(runner, ids, cached, options, rounded)
    tell = progress or _silent
    tell(0, len(methods) + 1)
    reference = work.reference(original, haystack)
    result = Evaluation(
        cached,
        work.tokens,
        work.cross_entropy(reference),
        work.greedy,
        0 if haystack is None else len(haystack.ids),
        reference.needle,
    )
    for number, method in enumerate(methods):
        tell(number + 1, len(methods) + 1)
        result.methods.append(work.result(method, reference))
    return result


def haystack_of(
    runner: Runner, tokenizer: Any, ids: Sequence[int], options: Options
) -> Haystack | None:
    """The needle test of these options in the model's full context, None without depths."""
    if not options.depths:
        return None
    most = runner.context
    context = options.context or most
    if context is None or (most is not None and context > most):
        raise UsageError(
            "usage.argument",
            "the needle test has no such context",
            expected="a --context of your choice" if most is None else f"at most {most:,}",
            found=context,
        )
    first = getattr(tokenizer, "bos_token_id", None)
    begins = list(ids[:1]) if first is not None and ids[0] == first else []

    def tokenise(text: str) -> list[int]:
        return [int(item) for item in tokenizer(text, add_special_tokens=False)["input_ids"]]

    return make_haystack(tokenise, ids[len(begins) :], context, options.depths, begins)


def fp8_method(original: Any) -> Method:
    """The cache in float8_e4m3fn without scales, as a yardstick."""

    def again(cache: Any, ids: Sequence[int]) -> Any:
        del ids
        limit = torch.finfo(torch.float8_e4m3fn).max
        for layer in cache.layers:
            if layer.is_initialized:
                for name in ("keys", "values"):
                    data = getattr(layer, name)
                    cast = data.float().clamp(-limit, limit).to(torch.float8_e4m3fn)
                    setattr(layer, name, cast.to(data.dtype))
        return cache

    return Method(FP8, 8.0, lambda: again(copy.deepcopy(original), ()), again)


def _silent(done: int, total: int) -> None:
    del done, total


def _kl(p: torch.Tensor, q: torch.Tensor) -> NDArray[np.float64]:
    """Divergence of ``q`` from ``p`` per token, both log probabilities ``[T, V]``."""
    exact = p.double()
    values: NDArray[np.float64] = (exact.exp() * (exact - q.double())).sum(-1).numpy()
    return values


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    scale = float(wanted.double().pow(2).mean().sqrt())
    error = float((found.double() - wanted.double()).pow(2).mean().sqrt())
    return error / scale if scale else error


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first elements are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
