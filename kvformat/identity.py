"""What a cache is the KV of: model, engine, lineage (spec section 6)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvformat import strictjson
from kvformat.fields import (
    DTYPE_NAME,
    FLOAT32_BITS,
    FLOAT64_BITS,
    Node,
    float32_of,
    float64_bits,
    frequency_bits,
    positive_bits,
    semantic_error,
    to_json,
)

ONE_BITS: Final = float64_bits(1.0)


@dataclass(frozen=True, slots=True)
class Reference:
    """A tokenizer or adapter: an id and, where known, a digest."""

    id: str
    digest: str | None = None

    @staticmethod
    def parse(node: Node) -> Reference:
        """From JSON."""
        m = node.members("digest", "id")
        return Reference(m["id"].text(), m["digest"].optional(Node.hash))

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {"digest": self.digest, "id": self.id}


@dataclass(frozen=True, slots=True)
class Model:
    """Model id, revision and digest of the weights."""

    id: str
    revision: str | None = None
    weights_digest: str | None = None

    @staticmethod
    def parse(node: Node) -> Model:
        """From JSON."""
        m = node.members("id", "revision", "weights_digest")
        return Model(
            m["id"].text(),
            m["revision"].optional(Node.text),
            m["weights_digest"].optional(Node.hash),
        )

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {"id": self.id, "revision": self.revision, "weights_digest": self.weights_digest}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of some layers; ``inv_freq`` is float bits, never recomputed (IDN-2)."""

    inv_freq: str
    layers: tuple[int, ...]
    keys_rotated: bool = True
    pairing: str = "half"
    scaling: str = ONE_BITS

    @staticmethod
    def from_array(
        inv_freq: NDArray[np.float32],
        layers: tuple[int, ...],
        *,
        keys_rotated: bool = True,
        pairing: str = "half",
        scaling: float = 1.0,
    ) -> Rope:
        """From the float32 frequencies ``[rotary_dim / 2]`` that the model holds."""
        bits = np.ascontiguousarray(inv_freq, dtype=">f4").tobytes().hex()
        return Rope(bits, layers, keys_rotated, pairing, float64_bits(scaling))

    @staticmethod
    def parse(node: Node) -> Rope:
        """From JSON."""
        m = node.members("inv_freq", "keys_rotated", "layers", "pairing", "scaling")
        return Rope(
            frequency_bits(m["inv_freq"]),
            m["layers"].each(Node.integer),
            m["keys_rotated"].boolean(),
            m["pairing"].choice("half", "interleaved"),
            positive_bits(m["scaling"], FLOAT64_BITS),
        )

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {
            "inv_freq": self.inv_freq,
            "keys_rotated": self.keys_rotated,
            "layers": list(self.layers),
            "pairing": self.pairing,
            "scaling": self.scaling,
        }


@dataclass(frozen=True, slots=True)
class CacheScale:
    """The factor of one role and layer of a quantised engine cache, as float bits."""

    layer: int
    role: str
    bits: str

    @staticmethod
    def parse(node: Node) -> CacheScale:
        """From JSON."""
        m = node.members("bits", "layer", "role")
        bits = positive_bits(m["bits"], FLOAT32_BITS)
        return CacheScale(m["layer"].integer(), m["role"].name(), bits)

    @property
    def value(self) -> float:
        """The factor."""
        return float32_of(self.bits)

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {"bits": self.bits, "layer": self.layer, "role": self.role}


@dataclass(frozen=True, slots=True)
class ScaleScheme:
    """How an engine scales its quantised cache."""

    name: str
    scales: tuple[CacheScale, ...] = ()

    @staticmethod
    def parse(node: Node) -> ScaleScheme:
        """From JSON."""
        m = node.members("name", "scales")
        return ScaleScheme(m["name"].name(), m["scales"].each(CacheScale.parse))

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {"name": self.name, "scales": to_json(self.scales)}


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotation of the stored values other than the rotary embedding."""

    name: str
    digest: str | None = None

    @staticmethod
    def parse(node: Node) -> Rotation:
        """From JSON."""
        m = node.members("digest", "name")
        return Rotation(m["name"].name(), m["digest"].optional(Node.hash))

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {"digest": self.digest, "name": self.name}


@dataclass(frozen=True, slots=True)
class EngineKey:
    """The key under which an engine that shows no tokens filed the cache (section 6.3)."""

    engine: str
    hash_algorithm: str
    key: str
    rank: int = 0
    world_size: int = 1
    engine_version: str | None = None

    @staticmethod
    def parse(node: Node) -> EngineKey:
        """From JSON."""
        m = node.members("engine", "engine_version", "hash_algorithm", "key", "rank", "world_size")
        key = EngineKey(
            m["engine"].text(),
            m["hash_algorithm"].text(),
            m["key"].text(),
            m["rank"].integer(),
            m["world_size"].integer(),
            m["engine_version"].optional(Node.text),
        )
        if key.rank >= key.world_size:
            raise semantic_error(
                "the rank is outside the world",
                f"{node.pointer}/rank",
                expected=f"below {key.world_size}",
                found=key.rank,
            )
        return key

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {
            "engine": self.engine,
            "engine_version": self.engine_version,
            "hash_algorithm": self.hash_algorithm,
            "key": self.key,
            "rank": self.rank,
            "world_size": self.world_size,
        }


_IDENTITY_KEYS: Final = (
    "adapters",
    "cache_dtype",
    "component",
    "engine_key",
    "kind",
    "layers_total",
    "model",
    "rope",
    "rotation",
    "scale_scheme",
    "tokenizer",
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity object (section 6.1)."""

    model: Model
    layers_total: int
    cache_dtype: str
    kind: str = "tokens"
    component: str = "main"
    tokenizer: Reference | None = None
    adapters: tuple[Reference, ...] = ()
    rope: tuple[Rope, ...] = ()
    rotation: Rotation | None = None
    scale_scheme: ScaleScheme | None = None
    engine_key: EngineKey | None = None

    @staticmethod
    def parse(node: Node) -> Identity:
        """From JSON; raises ``manifest.schema`` or ``manifest.semantics``."""
        m = node.members(*_IDENTITY_KEYS)
        identity = Identity(
            model=Model.parse(m["model"]),
            layers_total=m["layers_total"].integer(1, "layers_total"),
            cache_dtype=m["cache_dtype"].matching(DTYPE_NAME),
            kind=m["kind"].choice("tokens", "engine_key", "unbound"),
            component=m["component"].choice("main", "draft"),
            tokenizer=m["tokenizer"].optional(Reference.parse),
            adapters=m["adapters"].each(Reference.parse),
            rope=m["rope"].each(Rope.parse),
            rotation=m["rotation"].optional(Rotation.parse),
            scale_scheme=m["scale_scheme"].optional(ScaleScheme.parse),
            engine_key=m["engine_key"].optional(EngineKey.parse),
        )
        identity.check(node.pointer)
        return identity

    def check(self, pointer: str = "/identity") -> None:
        """IDN-3, IDN-4, IDN-7."""
        if (self.engine_key is not None) != (self.kind == "engine_key"):
            raise semantic_error(
                "engine_key and kind disagree", f"{pointer}/engine_key", found=self.kind
            )
        seen: set[int] = set()
        for index, rope in enumerate(self.rope):
            place = f"{pointer}/rope/{index}/layers"
            ascending = all(a < b for a, b in pairwise(rope.layers))
            if not ascending or any(layer >= self.layers_total for layer in rope.layers):
                raise semantic_error("layers not ascending below layers_total", place)
            if seen & set(rope.layers):
                raise semantic_error("a layer occurs in two rope elements", place)
            seen |= set(rope.layers)
        if self.scale_scheme is not None:
            scales = self.scale_scheme.scales
            place = f"{pointer}/scale_scheme/scales"
            if len({(item.role, item.layer) for item in scales}) != len(scales):
                raise semantic_error("two scales for one role and layer", place)
            if any(item.layer >= self.layers_total for item in scales):
                raise semantic_error("a scale for a layer that the model lacks", place)

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        return {key: to_json(getattr(self, key)) for key in _IDENTITY_KEYS}

    def canonical(self) -> bytes:
        """The bytes under the prefix chain (TOK-2)."""
        return strictjson.serialise(self.to_json())


@dataclass(frozen=True, slots=True)
class Lineage:
    """Whether the source tensors were exact or came from a lossy track (section 6.4)."""

    kind: str = "exact"
    generations: int = 0
    quality: str | None = None
    profile: str | None = None

    @staticmethod
    def parse(node: Node) -> Lineage:
        """From JSON."""
        if node.kind("exact", "lossy") == "exact":
            node.members("kind")
            return Lineage()
        m = node.members("generations", "kind", "profile", "quality")
        return Lineage(
            "lossy",
            m["generations"].integer(1),
            m["quality"].name(),
            m["profile"].optional(Node.digest),
        )

    def to_json(self) -> dict[str, Any]:
        """To JSON."""
        if self.kind == "exact":
            return {"kind": "exact"}
        return {
            "generations": self.generations,
            "kind": "lossy",
            "profile": self.profile,
            "quality": self.quality,
        }


EXACT_LINEAGE: Final = Lineage()
