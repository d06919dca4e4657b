"""One mutant: a place in the reference, what stands there instead, and how it is put there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType


@dataclass(frozen=True, slots=True)
class Mutant:
    """``old`` occurs once in ``module``; with ``new`` in its place the reader ``breaks`` a rule.

    ``hints`` are patterns of ids of the cases that are tried first. ``missing`` describes the case
    that would notice the mutant, where none does yet: then the hints name the whole area, and only
    these cases are tried.
    """

    name: str
    module: str
    old: str
    new: str
    breaks: str
    hints: tuple[str, ...]
    missing: str = ""

    def apply(self, source: str) -> str:
        """The changed source; raises ``ValueError`` if the place is not there exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {count} places in {self.module} read {self.old!r}")
        return source.replace(self.old, self.new)


class _Loader(SourceFileLoader):
    """Compiles the changed source; neither reads nor writes a ``.pyc``."""

    def __init__(self, mutant: Mutant, path: str) -> None:
        super().__init__(mutant.module, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode("utf-8")
        return compile(self._mutant.apply(source), f"{self.path}:{fullname}:mutant", "exec")


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(self._mutant, spec.origin)
        return spec


def install(mutant: Mutant) -> None:
    """From now on, importing the mutant's module gives the changed one."""
    if mutant.module in sys.modules:
        raise RuntimeError(f"{mutant.module} is already imported")
    sys.meta_path.insert(0, _Finder(mutant))
