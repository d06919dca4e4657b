"""From an artifact to what ``evaluation`` compares: checks, the original cache, the tracks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import DynamicCache

from kvformat.artifact import Artifact, open_artifact
from kvformat.digests import digest, digest_all
from kvformat.encoder import raw_bytes
from kvformat.errors import MismatchError, UsageError
from kvformat.expectations import Expectation, require_agreement
from kvformat.identity import Identity, Model
from kvformat.integrations.evaluation import Method
from kvformat.integrations.model_runs import Runner, parameters_as
from kvformat.integrations.torch_arrays import TORCH_DTYPES
from kvformat.integrations.transformers import (
    cache_of,
    check_same,
    identity_of,
    load,
    save,
)
from kvformat.planning import RELATIVE_STEPS
from kvformat.profile_shelf import ProfilePlaces, ProfileShelf
from kvformat.profiles import Profile
from kvformat.tracks import EXACT, TRANSFORMED, Track

EXACT_TRACK: Final = "exact track"
COMPUTED: Final = "computed"


@dataclass(frozen=True, slots=True)
class Original:
    """The cache that tracks are compared with, and where it comes from.

    ``is_source`` tells whether it is the tensors that the artifact was made from (CID-1).
    """

    cache: Any
    origin: str
    is_source: bool


def agreed_length(artifact: Artifact, ids: Sequence[int]) -> int:
    """The tokens of the artifact, all of which ``ids`` begin with; raises ``MismatchError``.

    The artifact must have been opened with ``ids`` as expectation.
    """
    manifest = artifact.manifest
    require_agreement(manifest, Expectation(token_ids=ids), artifact.verified_length or 0)
    count = manifest.tokens.count
    if artifact.verified_length != count or manifest.tokens.first_position:
        raise MismatchError(
            "tokens.length",
            "the text must begin with all tokens of the artifact",
            expected=f"{count:,} tokens from position 0 on",
            found=f"{artifact.verified_length:,} that agree",
            next_step="Give a longer text",
        )
    return count


def known_identity(artifact: Artifact, model: Any, model_id: str) -> Identity:
    """What the artifact must state of ``model``, as far as it states it; raises if it differs."""
    found = artifact.manifest.identity
    if found.rotation is not None or found.scale_scheme is not None:
        raise UsageError(
            "usage.argument",
            "caches with a rotation or scales of an engine cannot be evaluated",
            where="/identity",
        )
    known = identity_of(model, model_id=model_id)
    revision = known.model.revision if found.model.revision is not None else None
    mine = replace(
        known,
        model=Model(known.model.id, revision),
        cache_dtype=found.cache_dtype,
        rope=known.rope if found.rope else (),
        adapters=found.adapters,
        component=found.component,
    )
    check_same(found, mine)
    return mine


class Tracks:
    """The tracks of an artifact as methods, for one model and text."""

    def __init__(
        self,
        artifact: Artifact,
        runner: Runner,
        ids: Sequence[int],
        identity: Identity,
        profiles: ProfilePlaces = (),
    ) -> None:
        self.artifact = artifact
        self.runner = runner
        self.ids = list(ids)
        self.identity = identity
        self.count = agreed_length(artifact, ids)
        self.dtype = TORCH_DTYPES[artifact.groups[0].dtype]
        self._profiles = profiles
        self._profile: Profile | None = None

    def original(self, reference: Artifact | None = None) -> Original:
        """From an exact track, here or in ``reference``; without one the model computes it."""
        for place in (self.artifact, *(() if reference is None else (reference,))):
            exact = next((item for item in place.manifest.tracks if item.quality == EXACT), None)
            if exact is not None:
                self._check_content(place)
                return Original(self.restore(exact, place), EXACT_TRACK, True)
        with parameters_as(self.runner.model, self.dtype):
            cache = self.runner.prefill(self.ids[: self.count])
        computed = _cast(cache, self.dtype)
        is_source = self._source_digest(computed) == self.artifact.manifest.source_digest
        return Original(self.rounded(computed), COMPUTED, is_source)

    def _check_content(self, other: Artifact) -> None:
        mine, theirs = self.artifact.manifest.content_id, other.manifest.content_id
        if mine != theirs:
            raise MismatchError(
                "identity.field",
                "the reference is the cache of something else",
                where="/content_id",
                expected=mine,
                found=theirs,
                next_step="Write the exact track from the same cache, with the same statements",
            )

    def _source_digest(self, cache: Any) -> str:
        """CID-1 over a cache of this model; a window may hold more than the artifact."""
        tensors = {
            f"layers.{layer}.{group.group.role}": array
            for group in cache_of(cache).groups
            for layer, array in zip(group.group.layers, group.layers, strict=True)
        }
        parts = []
        for group in self.artifact.groups:
            start, stop = group.held(self.count)
            for layer in group.layers:
                array = tensors.get(f"layers.{layer}.{group.role}")
                if array is not None:
                    parts.append(digest(raw_bytes(array[len(array) - (stop - start) :])))
        return digest_all(parts).hex()

    def restore(self, track: Track, artifact: Artifact | None = None) -> Any:
        """A new cache from a track, placed for the model; every digest is checked."""
        loaded = load(
            artifact or self.artifact, self.runner.model, self.ids, identity=self.identity,
            track=track.name,
        )  # fmt: skip
        return self.runner.placed(loaded.cache)

    def rounded(self, cache: Any) -> Any:
        """``cache`` itself with values that the artifact's dtype has, placed for the model."""
        return self.runner.placed(_cast(cache, self.dtype))

    def method(self, track: Track, bits_per_value: float) -> Method:
        """A track; caches of other tokens go through an encoder of the same quality."""
        reason = self._cannot_encode(track)

        def again(cache: Any, ids: Sequence[int]) -> Any:
            return self._round_trip(track, cache, ids)

        return Method(
            track.name,
            bits_per_value,
            lambda: self.restore(track),
            None if reason else again,
            reason,
        )

    def _cannot_encode(self, track: Track) -> str:
        if track.quality in (*RELATIVE_STEPS, EXACT):
            return ""
        return f"quality {track.quality} cannot be written here, so turns and needles are left out"

    def profile_of(self, track: Track) -> Profile | None:
        """The calibration profile that a track needs; raises ``profile.missing``."""
        manifest = self.artifact.manifest
        if TRANSFORMED not in manifest.quality(track.quality).encodings:
            return None
        if self._profile is None:
            self._profile = ProfileShelf(self._profiles).find(manifest.profile or "")
        return self._profile

    def _round_trip(self, track: Track, cache: Any, ids: Sequence[int]) -> Any:
        """Write and read in the quality of ``track``; zstd restores the same bits as hevc."""
        profile = self.profile_of(track)
        more = [*ids, 0]  # load leaves one token to compute
        with tempfile.TemporaryDirectory(prefix="kvformat-evaluate-") as folder:
            path = Path(folder) / "again.kvf"
            save(
                path, _cast(cache, self.dtype), self.runner.model, list(ids),
                identity=self.identity, tracks=[f"{track.quality}/zstd"], profile=profile,
                lineage=self.artifact.lineage(track),
            )  # fmt: skip
            places = () if profile is None else profile
            with open_artifact(
                path, expect=Expectation(token_ids=more), profiles=places
            ) as artifact:
                loaded = load(artifact, self.runner.model, more, identity=self.identity)
        return self.runner.placed(loaded.cache)


def _cast(cache: Any, dtype: torch.dtype) -> DynamicCache:
    """``cache`` itself, in another dtype; clamped where that is narrower."""
    limit = torch.finfo(dtype).max
    for layer in cache.layers:
        if layer.is_initialized:
            layer.keys = layer.keys.clamp(-limit, limit).to(dtype)
            layer.values = layer.values.clamp(-limit, limit).to(dtype)
            layer.dtype = dtype
    return cache
