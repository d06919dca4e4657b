"""The calibration profiles of a store: each is read once, and shared by all that it opens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvformat.coefficients import ProfileWriter
from kvformat.errors import KvformatError, UnsupportedError, UsageError
from kvformat.groups import Group
from kvformat.identity import Identity
from kvformat.profile_shelf import ProfileShelf, load_profile
from kvformat.profiles import Profile, TransformRecord, check_model
from kvformat.storage.base import public_name

if TYPE_CHECKING:
    from kvformat.store.options import StoreOptions
    from kvformat.transforms import LayerTransform

MISSING: Final = "profile.missing"


class KeptProfile(Profile):
    """A profile whose matrices are checked and converted once, not for every extent."""

    __slots__ = ("_kept",)
    _kept: dict[tuple[str, str, int], LayerTransform]

    def __init__(self, profile: Profile) -> None:
        super().__init__(
            profile.model, profile.records, profile.writer, profile.digest, profile.data,
            profile.generator,
        )  # fmt: skip
        object.__setattr__(self, "_kept", {})  # the class is frozen

    def matrices(self, item: TransformRecord, where: str) -> LayerTransform:
        """As ``Profile.matrices``."""
        found = self._kept.get(item.key)
        if found is None:
            found = self._kept[item.key] = super().matrices(item, where)
        return found


class StoreProfiles(ProfileShelf):
    """The profile that is written with, and those that are looked for on reading.

    A place that cannot be read is ``profile.missing``, whatever is wrong with it: it says nothing
    about the object that needs the profile. Safe to share between threads.
    """

    def __init__(self, options: StoreOptions) -> None:
        own = () if options.profile is None else (options.profile,)
        super().__init__((*own, *options.profiles))
        self._own = options.profile
        self._lock = threading.Lock()
        self._kept: dict[str, Profile] = {}
        self._mine: Profile | None = None

    def find(self, digest: str) -> Profile:
        """As ``ProfileShelf.find``; places are searched until it is found once."""
        with self._lock:
            if digest not in self._kept:
                self._kept[digest] = KeptProfile(self._search(digest))
            return self._kept[digest]

    def _search(self, digest: str) -> Profile:
        """A place that cannot be read hides none of the others."""
        failed: KvformatError | None = None
        for place in self._places:
            try:
                return ProfileShelf(place).find(digest)
            except KvformatError as error:
                if failed is None or error.code != MISSING:
                    failed = error
        if failed is None or failed.code == MISSING:
            return super().find(digest)  # which names all places
        raise _missing(failed, digest)

    def own(self) -> Profile | None:
        """The profile that is written with; raises ``profile.missing``."""
        with self._lock:
            if self._own is not None and self._mine is None:
                try:
                    found = load_profile(self._own)
                except KvformatError as error:
                    raise _missing(error, public_name(str(self._own))) from error
                self._mine = self._kept.setdefault(found.digest, KeptProfile(found))
            return self._mine

    def require(self, quality: str, identity: Identity, groups: Sequence[Group]) -> Profile | None:
        """The profile that is written with, fit for at least one of ``groups``.

        Raises ``profile.missing``, ``profile.content`` for one of another model or where the
        identity lacks the rotation of a layer, and ``usage.argument`` where it fits no group.
        """
        own = self.own()
        if own is None:
            return None
        check_model(own, identity.model)
        writer = ProfileWriter(own)
        fitting = [item for item in groups if item.quantisable and writer.fits(quality, item)]
        if not fitting:
            raise UsageError(
                "usage.argument",
                "the profile has no transform for what is to be stored",
                where=f"profile {own.digest[:12]}",
                expected=f"{quality} for {'; '.join(map(_said, groups))}"[:300],
                found=", ".join(sorted({f"{r.quality} for {_held(r)}" for r in own.records}))[:300],
                next_step="Store without a profile; one for all heads fits no part of them",
            )
        for group in fitting:
            for layer in group.layers:
                own.transform(quality, group, layer, identity)
        return own


def _said(group: Group) -> str:
    first, heads = group.head_start, group.heads
    return f"{group.role} heads {first} to {first + heads - 1} of {group.heads_total}"


def _held(record: TransformRecord) -> str:
    first, heads = record.head_start, record.heads
    return f"{record.role} heads {first} to {first + heads - 1} of {record.heads_total}"


def _missing(error: KvformatError, wanted: str) -> KvformatError:
    if error.code == MISSING:
        return error
    return UnsupportedError(
        MISSING,
        f"a calibration profile cannot be read: {error.message}",
        where=error.where,
        expected=wanted,
        found=error.found,
        next_step=error.next_step,
    )
