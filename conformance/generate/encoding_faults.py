"""Calls of ``encode`` that must be refused, with nothing left behind."""

# ruff: noqa: E501 - long sentences and tables

from __future__ import annotations

from conformance.generate.compose import EXACT, IDENTITY, STORED, RawGroup, noise
from conformance.generate.encoding_parts import bad, pair, with_value
from conformance.generate.identity import BOUND, IDS
from conformance.generate.suite import Suite


def add_cases(suite: Suite) -> None:
    """All of this module."""
    values = {"nan": b"\xc0\x7f", "infinity": b"\x80\x7f", "minus-infinity": b"\x80\xff"}
    for slug, bits in values.items():
        bad(
            suite,
            f"quantised-{slug}",
            "ARI-7 PUB-1 ERR-4",
            with_value(pair(40), (2, 39, 1, 3), bits),
            40,
            [STORED],
            "input.non-finite",
            f"The very last value is {slug.replace('-', ' ')}, and a track is to be quantised.",
            "It has no integer; and nothing may be left of what was written before it was seen.",
        )
    bad(
        suite,
        "quantised-nan-in-a-first-token",
        "ARI-7 SID-5 PUB-1 ERR-4",
        with_value(pair(40), (0, 0, 0, 0), values["nan"]),
        40,
        [STORED],
        "input.non-finite",
        "A NaN in the first token, which many writers keep as a patch.",
        "A patch holds no NaN either.",
    )
    bad(
        suite,
        "quantised-and-exact-nan",
        "ARI-7 PUB-1 ERR-4",
        with_value(pair(40), (2, 39, 1, 3), values["nan"]),
        40,
        [STORED, EXACT],
        "input.non-finite",
        "A NaN, a track that could hold it and one that could not.",
        "A file with fewer tracks than asked for is not what was asked for.",
    )
    groups = pair(10)
    whole = {f"{group.name}.bin": group.source.tobytes() for group in groups}
    for slug, change in (
        ("short", whole["values.bin"][:-1]),
        ("long", whole["values.bin"] + b"\0"),
        ("empty", b""),
    ):
        bad(
            suite,
            f"tensors-{slug}",
            "GRP-1 PUB-1 ERR-4",
            groups,
            10,
            [EXACT],
            "input.shape",
            f"The file of the second group is {'empty' if not change else 'one byte too ' + slug}.",
            "Shapes come from SPEC and must fit the bytes.",
            files={**whole, "values.bin": change},
        )
    wrong = pair(5)
    wrong[1].dtype = "int8"
    bad(
        suite,
        "unknown-dtype",
        "GRP-1 PUB-1",
        wrong,
        5,
        [EXACT],
        "input.dtype",
        "A group of int8, which the format lacks.",
        "It could be stored as uint8, but that is the caller's decision.",
    )
    bad(
        suite,
        "target-exists",
        "PUB-2 PUB-3 PUB-1",
        pair(5),
        5,
        [EXACT],
        "io.exists",
        "FILE exists.",
        "A published artifact is never changed, and nobody asked to replace it: it must have the same bytes afterwards.",
        existing=True,
    )
    one = pair(5)
    for slug, rules, what, members in (
        (
            "no-token-ids",
            "IDN-5",
            "An identity of kind tokens without token ids.",
            {"identity": BOUND},
        ),
        (
            "too-few-token-ids",
            "IDN-5 TOK-3",
            "Four ids for five tokens.",
            {"identity": BOUND, "token_ids": IDS[:4]},
        ),
        (
            "too-many-token-ids",
            "IDN-5 TOK-3",
            "Six ids for five tokens.",
            {"identity": BOUND, "token_ids": IDS[:6]},
        ),
        (
            "part-inside-a-block",
            "TOK-7",
            "A part that starts at position 100, inside a block.",
            {"identity": BOUND, "token_ids": IDS[:105], "first_position": 100},
        ),
        (
            "no-engine-key",
            "IDN-4",
            "An identity of kind engine_key without a key.",
            {"identity": {**IDENTITY, "kind": "engine_key"}},
        ),
        (
            "unknown-member",
            "IDN-1",
            "An identity with a member that the format lacks.",
            {"identity": {**IDENTITY, "seed": 1}},
        ),
        (
            "missing-member",
            "IDN-1",
            "An identity without the member rope.",
            {"identity": {key: item for key, item in IDENTITY.items() if key != "rope"}},
        ),
    ):
        bad(
            suite,
            slug,
            rules,
            one,
            5,
            [EXACT],
            "input.identity",
            what,
            "A writer that lets it pass makes a file that every reader refuses.",
            **members,
        )
    many = [
        RawGroup(f"g{n}", f"role-{n}", "uint8", (0,), noise(f"g{n}", 1).reshape(1, 1, 1, 1, 1))
        for n in range(65)
    ]
    heads = pair(5)
    for group in heads:
        group.heads_total = 65_537
    for slug, groups_, count, what, limits, members in (
        ("too-many-groups", many, 1, "65 groups", "groups", {}),
        ("too-many-heads", heads, 5, "65,537 heads in all", "heads", {}),
        (
            "too-many-layers",
            one,
            5,
            "layers_total 65,537",
            "layers_total",
            {"identity": {**IDENTITY, "layers_total": 65_537}},
        ),
        ("position-too-high", one, 5, "first_position 2^40", "tokens", {"first_position": 2**40}),
    ):
        bad(
            suite,
            slug,
            "LIM-1 IDN-1",
            groups_,
            count,
            [EXACT],
            "input.range",
            f"A cache with {what}, above the limit of section 12.",
            "A reader must refuse such a file, so a writer must not make it.",
            limits=(limits,),
            **members,
        )
