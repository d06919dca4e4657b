"""What a view serves, and the check of an artifact against it. Pure but for the open artifact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvformat.artifact import Artifact
from kvformat.groups import Group
from kvformat.identity import Identity
from kvformat.store.faults import MissError
from kvformat.store.lookup import Grid
from kvformat.store.names import Namespace, ObjectName, key_digest
from kvformat.store.results import ExtentRef, Miss
from kvformat.tokens import BLOCK_TOKENS
from kvformat.tracks import EXACT

Shape = tuple[str, str, tuple[int, ...], int, int, int, int]


@dataclass(frozen=True, slots=True)
class Scope:
    """The namespace of a view and what an artifact in it must agree with."""

    namespace: Namespace
    grid: Grid
    identity: Identity
    salt: bytes
    quality: str
    groups: tuple[Group, ...] | None = None
    windowed: bool = False
    window_tokens: int | None = None

    def name(self, hashes: Sequence[str], end: int) -> ObjectName:
        """The object that leads to the state after ``end`` blocks."""
        return ObjectName(self.namespace, hashes[end - 1], end)

    def cells(self, hashes: Sequence[str], end: int) -> tuple[ExtentRef, ...]:
        """The cells of the prefix of ``end`` blocks."""
        return tuple(
            ExtentRef(self.name(hashes, item), self.grid.cell_of(item), item)
            for item in self.grid.ends(end)
        )

    def names(self, hashes: Sequence[str], start: int, end: int) -> tuple[ObjectName, ...]:
        """The names of an extent [``start``, ``end``), ascending."""
        first = start + 1 if self.grid.dense else end
        return tuple(self.name(hashes, item) for item in range(first, end + 1))

    def names_in_cell(self, hashes: Sequence[str], end: int) -> tuple[ObjectName, ...]:
        """All names up to ``end`` that its cell may have, ascending."""
        return tuple(self.name(hashes, item) for item in self.grid.names_in_cell(end))

    def check(self, artifact: Artifact, extent: ExtentRef, hashes: Sequence[str]) -> int:
        """The block at which the artifact starts, inside ``extent``.

        Raises ``MissError`` unless it is the KV of the blocks from there to ``extent.end`` of
        this request. Comparing with the hashes of the request is TOK-10 and TOK-14: they were
        computed over its token ids and content, the identity and the salt.
        """
        self._check_identity(artifact)
        self._check_kind(artifact)
        tokens, end = artifact.manifest.tokens, extent.end
        chain = tokens.chain
        if chain is None or chain.salted != bool(self.salt):
            raise MissError(Miss.OTHER_TOKENS, "no chain, or one of another tenant")
        start = tokens.first_position // BLOCK_TOKENS
        if not extent.start <= start < end:
            raise MissError(Miss.OTHER_TOKENS, "it begins at another position")
        if chain.parent != (hashes[start - 1] if start else None):
            raise MissError(Miss.OTHER_TOKENS, "the tokens before it are others")
        count = (end - start) * BLOCK_TOKENS
        if chain.hashes[: end - start] != tuple(hashes[start:end]) or tokens.count < count:
            raise MissError(Miss.OTHER_TOKENS, "it holds other tokens")
        lengths = artifact.manifest.valid_lengths
        if lengths is not None and count not in lengths:
            raise MissError(Miss.OTHER_TOKENS, f"it does not serve {count} tokens")
        return start

    def check_key(self, artifact: Artifact, name: ObjectName) -> None:
        """The same for an engine's own key."""
        identity = artifact.manifest.identity
        key = identity.engine_key
        if key is None or key_digest(key, self.salt) != name.digest:
            raise MissError(Miss.OTHER_TOKENS, "it was filed under another key")
        self._check_identity(artifact)
        self._check_kind(artifact)

    def _check_identity(self, artifact: Artifact) -> None:
        mine, theirs = self.identity.to_json(), artifact.manifest.identity.to_json()
        mine["engine_key"] = theirs["engine_key"] = None
        if mine == theirs:
            return
        differing = sorted(key for key in mine if mine[key] != theirs[key])
        miss = Miss.OTHER_IDENTITY
        if "model" in differing:
            miss = Miss.OTHER_MODEL
        elif "cache_dtype" in differing:
            miss = Miss.OTHER_DTYPE
        raise MissError(miss, f"the identity differs in {', '.join(differing)}")

    def _check_kind(self, artifact: Artifact) -> None:
        """Lineage, quality and shapes."""
        if artifact.manifest.lineage.generations and not self.namespace.mixed:
            raise MissError(Miss.LINEAGE, "it was computed on top of lossy KV")
        if not any(item.quality in (self.quality, EXACT) for item in artifact.manifest.tracks):
            raise MissError(Miss.QUALITY, f"it has {', '.join(artifact.tracks)}")
        if self.groups is not None:
            wanted, found = (
                sorted(map(shape_of, self.groups)),
                sorted(map(shape_of, artifact.groups)),
            )
            if wanted != found:
                dtypes = {item[1] for item in wanted} != {item[1] for item in found}
                miss = Miss.OTHER_DTYPE if dtypes else Miss.OTHER_SHAPE
                raise MissError(miss, f"it holds {found}, not {wanted}"[:500])


def shape_of(group: Group) -> Shape:
    """What two groups must have in common, whatever their names and tokens."""
    return (
        group.role, group.dtype, group.layers, group.heads, group.head_dim, group.head_start,
        group.heads_total,
    )  # fmt: skip
