"""A store against a dictionary: puts, loads, eviction, damage, crashes, two processes' worth."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvformat
from kvformat.errors import KvformatError
from kvformat.store import HeldHit, Store, View
from kvformat.store.eviction import collect, group_entries
from kvformat.store.lookup import probe_limit
from tests.stores import BLOCK, DIM, EXACT, HEADS, IDENTITY, LAYERS, inline_store, kv_of, tokens

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


class CrashError(BaseException):
    """A process that ends here: no handler of the store may catch it."""


class StoreMachine(RuleBasedStateMachine):
    """``model`` holds what must be found: prefixes that were stored since the last loss.

    What is loaded is compared with what the tokens' KV is, whatever the model says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.model: set[tuple[int, ...]] = set()
        self.stores: list[Store] = []
        self.held: list[tuple[HeldHit, tuple[int, ...]]] = []
        self.damaged = False

    @initialize()
    def start(self) -> None:
        self.stores = [inline_store(self.root, EXACT) for _ in range(2)]

    def teardown(self) -> None:
        for hit, _ in self.held:
            hit.release()
        for store in self.stores:
            store.close()
        shutil.rmtree(self.root)

    def view(self, which: int) -> View:
        return self.stores[which].view(IDENTITY, salt=b"x")

    def files(self) -> list[Path]:
        return sorted(self.root.glob("*/*/*/*/*/*.kvf"))

    @rule(which=st.integers(0, 1), prompt=PROMPTS, behind=st.booleans())
    def put(self, which: int, prompt: tuple[int, ...], behind: bool) -> None:
        view, ids = self.view(which), tokens(*prompt)
        first = view.probe(ids).tokens if behind else 0
        view.put(kv_of(ids)[:, :, first:], ids, first_position=first)
        if not self.damaged:
            self.model.update(prompt[:end] for end in range(1, len(prompt) + 1))

    @rule(which=st.integers(0, 1), prompt=PROMPTS)
    def load(self, which: int, prompt: tuple[int, ...]) -> None:
        view, ids = self.view(which), tokens(*prompt)
        with view.lookup(ids) as hit:
            assert hit.hit.probes <= probe_limit(len(prompt))
            self.compare(view, hit, prompt)
            wanted = max((n for n in range(len(prompt) + 1) if prompt[:n] in self.model), default=0)
            assert hit.tokens >= wanted * BLOCK

    def compare(self, view: View, hit: HeldHit, prompt: tuple[int, ...]) -> None:
        out = np.full((2, LAYERS, hit.tokens, HEADS, DIM), np.nan, np.float16)
        report = view.load_into(hit, out)
        good = kv_of(tokens(*prompt))[:, :, : report.tokens]
        assert np.array_equal(out[:, :, : report.tokens].view("u2"), good.view("u2"))
        assert report.complete == (not report.faults)
        assert report.complete or self.damaged

    @rule(which=st.integers(0, 1), prompt=PROMPTS)
    def hold(self, which: int, prompt: tuple[int, ...]) -> None:
        hit = self.view(which).lookup(tokens(*prompt))
        if hit:
            self.held.append((hit, prompt))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hit, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        hit.release()

    @rule(which=st.integers(0, 1), part=st.sampled_from([0.0, 0.3, 0.6]))
    def evict(self, which: int, part: float) -> None:
        """What is held stays, and can be loaded whole."""
        backend = self.stores[which].backend
        total = sum(item.size_bytes for item in group_entries(backend.entries())[0])
        collect(backend, None, goal_bytes=int(part * total))
        self.model.clear()
        if not self.damaged:
            for hit, prompt in self.held:
                found = self.view(which).probe(tokens(*prompt))
                assert found.tokens >= hit.tokens
                self.compare(self.view(which), hit, prompt)

    @precondition(lambda self: self.files())
    @rule(data=st.data(), cut=st.booleans())
    def damage(self, data: st.DataObject, cut: bool) -> None:
        path = data.draw(st.sampled_from(self.files()))
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1)) if content else 0
        with path.open("r+b") as file:
            if cut:
                file.truncate(place)
            elif content:
                file.seek(place)
                file.write(bytes([content[place] ^ 1]))
        self.damaged = True
        self.model.clear()

    @rule(which=st.integers(0, 1), prompt=PROMPTS, steps=st.integers(0, 6), call=st.booleans())
    def crash(self, which: int, prompt: tuple[int, ...], steps: int, call: bool) -> None:
        """Die at the n-th link or rename; what is stored by then is whole."""
        left = steps
        link, replace = os.link, Path.replace

        def count() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise CrashError

        def counting_link(*given: object) -> None:
            count() if call else None
            link(*given)  # type: ignore[arg-type]
            None if call else count()

        def counting_replace(path: Path, target: Path) -> Path:
            count()
            return replace(path, target)

        ids = tokens(*prompt)
        with (
            mock.patch("kvformat.store.local.os.link", counting_link),
            mock.patch.object(Path, "replace", counting_replace),
        ):
            try:
                self.view(which).put(kv_of(ids), ids)
            except CrashError:
                self.stores[which] = inline_store(self.root, EXACT)

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = inline_store(self.root, EXACT)

    @invariant()
    def every_name_leads_to_a_whole_artifact(self) -> None:
        if self.damaged:
            return
        for path in self.files():
            try:
                with kvformat.open(path) as artifact:
                    artifact.check_end()
            except KvformatError as error:
                pytest.fail(f"{path.name}: {error}")


StoreMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestStoreModel = StoreMachine.TestCase
