"""Names of objects in a store. Pure: values in, text out, and back.

::

    <tenant>/<model>[.<part>]/v<version>/<quality>.<grid>/<hh>/<hash>-<end>[.<variant>].kvf
    t-5b0c.../smollm2-135m-9f2e.../v0.9/near-lossless.g4/3f/3fa1...-8.kvf

``tenant``   ``shared`` without a salt, else derived from the salt in one direction.
``model``    readable start of the model's id, and 32 digits of the BLAKE3 of the identity object:
             another model, revision, adapter, cache dtype or rope is another namespace.
``part``     which layers and heads, where an engine's rank holds only some.
``quality``  a quality of the registry; ``.mixed`` behind it where KV that was computed on top of
             restored lossy KV may lie beside the rest.
``grid``     ``g4``: extents start at multiples of 4 blocks of 256 tokens, and every block boundary
             inside an extent has a name; ``s4``: only ends of 1, 2 and 4 blocks have one; ``k``:
             keys of an engine.
``hash``     the chain hash h(``end``) of spec section 6.2, where ``end`` counts blocks from
             position 0. It is the state that the KV of these tokens leads to.
``variant``  another encoding of the same extent, ``hevc`` for example.

Everything that decides whether KV may be served is checked again inside the artifact: a name only
finds it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from kvformat.digests import chain_key, digest, keyed_digest
from kvformat.errors import UsageError
from kvformat.identity import EngineKey, Identity
from kvformat.manifest import VERSION
from kvformat.planning import RELATIVE_STEPS
from kvformat.strictjson import serialise
from kvformat.tracks import EXACT

KNOWN_VERSIONS: Final = (VERSION,)
SHARED: Final = "shared"
WHOLE: Final = "all"
KEYED: Final = "k"
MIXED: Final = ".mixed"
SUFFIX: Final = ".kvf"
CELL_BLOCKS: Final = (1, 2, 4, 8, 16)

_PART: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_FILE: Final = re.compile(r"([0-9a-f]{64})-(0|[1-9][0-9]{0,9})(?:\.([a-z0-9]{1,16}))?\.kvf")
_FOLDER: Final = re.compile(
    r"(?P<tenant>shared|t-[0-9a-f]{32})/(?P<model>[a-z0-9-]{1,80})(?:\.(?P<part>[a-z0-9-]{1,64}))?"
    r"/v(?P<version>[0-9]+\.[0-9]+)/(?P<quality>[a-z0-9-]{1,48}(?:\.mixed)?)"
    r"\.(?P<grid>[gs](?:1|2|4|8|16)|k)/[0-9a-f]{2}"
)


@dataclass(frozen=True, slots=True)
class Namespace:
    """Where the extents of one tenant, model, part, version and quality lie."""

    tenant: str
    model: str
    quality: str
    grid: str
    part: str = WHOLE
    version: str = VERSION

    @property
    def folder(self) -> str:
        """The path of all its objects, below the store's root."""
        part = "" if self.part == WHOLE else f".{self.part}"
        model = f"{self.model}{part}"
        return f"{self.tenant}/{model}/v{self.version}/{self.quality}.{self.grid}"

    @property
    def known(self) -> bool:
        """Whether this release writes and reads the version."""
        return self.version in KNOWN_VERSIONS

    @property
    def mixed(self) -> bool:
        """Whether KV of lossy lineage may lie here."""
        return self.quality.endswith(MIXED)

    @property
    def cell_blocks(self) -> int:
        """Blocks of the longest extent; 0 for keys of an engine."""
        return 0 if self.grid == KEYED else int(self.grid[1:])


@dataclass(frozen=True, slots=True)
class ObjectName:
    """One object: ``digest`` is h(``end``) as 64 digits, or that of an engine's key."""

    namespace: Namespace
    digest: str
    end: int = 0
    variant: str = ""

    @property
    def path(self) -> str:
        """Below the store's root."""
        variant = f".{self.variant}" if self.variant else ""
        file = f"{self.digest}-{self.end}{variant}{SUFFIX}"
        return f"{self.namespace.folder}/{self.digest[:2]}/{file}"

    def as_variant(self, variant: str) -> ObjectName:
        """The same extent in another encoding."""
        return replace(self, variant=variant)


def parse_path(path: str) -> ObjectName | None:
    """The name behind a path below the root; None for anything that this module did not make."""
    folder, _, file = path.rpartition("/")
    place, found = _FOLDER.fullmatch(folder), _FILE.fullmatch(file)
    if place is None or found is None or not folder.endswith(found[1][:2]):
        return None
    fields = place.groupdict()
    fields["part"] = fields["part"] or WHOLE
    return ObjectName(Namespace(**fields), found[1], int(found[2]), found[3] or "")


def tenant_name(salt: bytes) -> str:
    """``shared``, or 128 bits that do not lead back to the salt."""
    if not salt:
        return SHARED
    return f"t-{keyed_digest(chain_key(salt), b'kvformat store tenant').hex()[:32]}"


def model_name(identity: Identity) -> str:
    """A readable start and 32 digits of the whole identity, without the key of an engine."""
    said = identity.to_json()
    said["engine_key"] = None
    text = identity.model.id.rpartition("/")[2].lower()
    start = re.sub(r"[^a-z0-9]+", "-", text).strip("-")[:40].strip("-") or "model"
    return f"{start}-{digest(serialise(said)).hex()[:32]}"


def key_digest(key: EngineKey, salt: bytes) -> str:
    """The name of what an engine files under ``key``, different for each tenant."""
    return keyed_digest(chain_key(salt), serialise(key.to_json())).hex()


def quality_name(quality: str, *, mixed: bool) -> str:
    """The quality's part of a namespace; raises ``usage.argument`` for an unknown one."""
    if quality not in (*RELATIVE_STEPS, EXACT):
        raise UsageError(
            "usage.argument", "unknown quality", expected=", ".join((*RELATIVE_STEPS, EXACT)),
            found=ascii(quality)[:60],
        )  # fmt: skip
    return quality + (MIXED if mixed else "")


def checked_part(part: str) -> str:
    """A part's label; raises ``usage.argument``."""
    if not isinstance(part, str) or not _PART.fullmatch(part):
        raise UsageError(
            "usage.argument",
            "a part is not a label",
            expected="lower-case letters, digits and hyphens, for example l0-16-h0-4",
            found=ascii(part)[:80],
        )
    return part


def part_name(layers: tuple[int, int], heads: tuple[int, int]) -> str:
    """The label of layers ``[first, stop)`` and KV heads ``[first, stop)``: ``l0-16-h0-4``."""
    return f"l{layers[0]}-{layers[1]}-h{heads[0]}-{heads[1]}"


def checked_version(version: str) -> str:
    """A version that this release can write; raises ``usage.argument``."""
    if version not in KNOWN_VERSIONS:
        raise UsageError(
            "usage.argument",
            "this release does not write that version",
            expected=", ".join(KNOWN_VERSIONS),
            found=ascii(version)[:40],
        )
    return version
