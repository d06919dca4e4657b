"""VPS, SPS and PPS of an ``hevc`` payload with one field changed at a time (HEV-4, HEV-12)."""

from __future__ import annotations

import pytest

from tests.requirements import covers
from tests.test_payload_rules import HEVC, accepted, base, joined, refused, units

# In the order of ITU-T H.265: a number of bits, or ``ue`` for an Exp-Golomb number.
PROFILE = [("profile_space", 2), ("tier", 1), ("profile_idc", 5), ("profile_rest", 88)]
FIELDS: dict[int, list[tuple[str, int | str]]] = {
    0: [
        ("vps_id", 4), ("base_layer", 2), ("max_layers_minus1", 6), ("max_sub_layers_minus1", 3),
        ("nesting_and_reserved", 17), *PROFILE,
    ],
    1: [
        ("vps_id", 4), ("max_sub_layers_minus1", 3), ("nesting", 1), *PROFILE, ("sps_id", "ue"),
        ("chroma_format_idc", "ue"), ("separate_colour_plane", 1), ("width", "ue"),
        ("height", "ue"), ("conformance_window", 1), ("bit_depth_luma", "ue"),
        ("bit_depth_chroma", "ue"), ("log2_max_poc", "ue"), ("sub_layer_ordering", 1),
        ("max_dec_pic_buffering_minus1", "ue"), ("max_num_reorder", "ue"), ("max_latency", "ue"),
        ("min_block", "ue"), ("block_difference", "ue"), ("min_transform", "ue"),
        ("transform_difference", "ue"), ("depth_inter", "ue"), ("depth_intra", "ue"),
        ("scaling_list_enabled", 1), ("amp", 1), ("sao", 1), ("pcm_enabled", 1),
        ("reference_sets", "ue"), ("long_term_ref_pics", 1), ("temporal_mvp", 1),
        ("strong_intra", 1), ("vui", 1), ("aspect", 1), ("overscan", 1), ("video_signal", 1),
        ("video_format", 3), ("full_range", 1), ("colours", 1), ("chroma_location", 1),
        ("neutral_chroma", 1), ("field_seq", 1), ("frame_field", 1),
        ("default_display_window", 1),
    ],
    2: [
        ("pps_id", "ue"), ("sps_id", "ue"), ("dependent_slices", 1), ("output_flag", 1),
        ("extra_bits", 3), ("sign_hiding", 1), ("cabac_init", 1), ("l0", "ue"), ("l1", "ue"),
        ("init_qp", "ue"), ("constrained_intra", 1), ("transform_skip", 1), ("cu_qp_delta", 1),
    ],
}  # fmt: skip


def bits_of(unit: bytes) -> str:
    """The RBSP behind the two header bytes."""
    body = unit[2:].replace(b"\0\0\3", b"\0\0")
    return "".join(f"{byte:08b}" for byte in body)


def unit_of(head: bytes, bits: str) -> bytes:
    """The inverse: aligns with zeros behind the stop bit and escapes."""
    bits = bits.rstrip("0")
    bits += "0" * (-len(bits) % 8)
    body = int(bits, 2).to_bytes(len(bits) // 8, "big")
    escaped = bytearray()
    for byte in body:
        if byte <= 3 and escaped[-2:] == b"\0\0":
            escaped.append(3)
        escaped.append(byte)
    return head + bytes(escaped)


def exp_golomb(value: int) -> str:
    text = f"{value + 1:b}"
    return "0" * (len(text) - 1) + text


def spans(number: int, bits: str) -> dict[str, tuple[int, int]]:
    """Where each field of FIELDS lies; those behind cu_qp_delta and the VUI are left out."""
    found, place = {}, 0
    for name, kind in FIELDS[number]:
        size = kind if isinstance(kind, int) else 2 * bits.index("1", place) - 2 * place + 1
        found[name] = (place, place + size)
        place += size
    return found


def changed(number: int, field: str, new: str) -> bytes:
    """The payload with one field of one parameter set replaced by other bits."""
    parts = units(base()[0])
    bits = bits_of(parts[number])
    start, stop = spans(number, bits)[field]
    parts[number] = unit_of(parts[number][:2], bits[:start] + new + bits[stop:])
    return joined(parts)


def value_of(number: int, field: str) -> str:
    """The bits of a field as they are."""
    bits = bits_of(units(base()[0])[number])
    start, stop = spans(number, bits)[field]
    return bits[start:stop]


def test_the_fields_are_where_they_are_thought_to_be() -> None:
    layout = base()[1]
    assert value_of(1, "width") == exp_golomb(layout["width"])
    assert value_of(1, "height") == exp_golomb(layout["height"])
    assert value_of(1, "chroma_format_idc") == exp_golomb(3)
    assert value_of(1, "profile_idc") == value_of(0, "profile_idc") == "00100"
    assert value_of(1, "reference_sets") == exp_golomb(0)
    assert value_of(1, "vui") == "1"
    assert value_of(2, "pps_id") == exp_golomb(0)
    for number, fields in FIELDS.items():
        for name, _ in fields:
            accepted(changed(number, name, value_of(number, name)), HEVC)


REFUSED = [
    (0, "vps_id", "0001"), (0, "max_layers_minus1", "000001"), (0, "max_sub_layers_minus1", "001"),
    (0, "profile_space", "01"), (0, "profile_idc", "00001"), (0, "profile_idc", "00101"),
    (1, "vps_id", "0001"), (1, "max_sub_layers_minus1", "001"), (1, "profile_space", "10"),
    (1, "profile_idc", "00001"), (1, "sps_id", exp_golomb(1)),
    (1, "chroma_format_idc", exp_golomb(0)), (1, "chroma_format_idc", exp_golomb(1)),
    (1, "chroma_format_idc", exp_golomb(2)), (1, "separate_colour_plane", "1"),
    (1, "width", exp_golomb(152)), (1, "height", exp_golomb(16)), (1, "width", exp_golomb(2**16)),
    (1, "width", exp_golomb(2**31)), (1, "width", "0" * 40 + "1"), (1, "height", exp_golomb(0)),
    (1, "conformance_window", "1" + exp_golomb(0) * 4), (1, "bit_depth_luma", exp_golomb(2)),
    (1, "bit_depth_chroma", exp_golomb(2)), (1, "log2_max_poc", exp_golomb(13)),
    (1, "max_dec_pic_buffering_minus1", exp_golomb(5)), (1, "max_num_reorder", exp_golomb(1)),
    (1, "scaling_list_enabled", "10"), (1, "pcm_enabled", "1" + "0" * 8 + exp_golomb(0) * 2 + "0"),
    (1, "reference_sets", exp_golomb(65)), (1, "long_term_ref_pics", "1" + exp_golomb(0)),
    (1, "field_seq", "1"), (1, "default_display_window", "1" + exp_golomb(0) * 4),
    (2, "pps_id", exp_golomb(1)), (2, "sps_id", exp_golomb(1)),
]  # fmt: skip


@covers("HEV-4", "HEV-6", "HEV-12")
@pytest.mark.parametrize(("number", "field", "new"), REFUSED)
def test_a_field_with_another_value(number: int, field: str, new: str) -> None:
    refused(changed(number, field, new), HEVC)


def reference_set(negative: int, positive: int, *, later: bool = False) -> str:
    """One short-term reference picture set, coded without prediction."""
    pictures = (exp_golomb(0) + "1") * (negative + positive)
    return ("0" if later else "") + exp_golomb(negative) + exp_golomb(positive) + pictures


@covers("HEV-12")
@pytest.mark.parametrize(
    ("sets", "good"),
    [
        ([reference_set(1, 0)], True),
        ([reference_set(0, 0)], True),
        ([reference_set(1, 0), reference_set(0, 0, later=True)], True),
        ([reference_set(2, 0)], False),
        ([reference_set(0, 1)], False),
        ([reference_set(16, 0)], False),
        ([reference_set(1, 0), reference_set(2, 0, later=True)], False),
        ([reference_set(1, 0), "1" + "1" + exp_golomb(0) + "11"], False),
    ],
)
def test_reference_picture_sets(sets: list[str], good: bool) -> None:
    payload = changed(1, "reference_sets", exp_golomb(len(sets)) + "".join(sets))
    if good:
        accepted(payload, HEVC)
    else:
        refused(payload, HEVC)


@covers("HEV-11", "HEV-14")
@pytest.mark.parametrize(
    ("full_range", "colours", "good"),
    [
        ("0", "0", True),
        ("1", "0", True),
        ("1", "1" + "00000001" * 3, True),
        ("0", "1" + "00001001" * 3, True),
        ("0", "1" + "00000010" * 3, True),
        ("1", "1" + "00000001" * 2 + "00000000", False),
    ],
)
def test_colour_descriptions(full_range: str, colours: str, good: bool) -> None:
    assert value_of(1, "video_signal") == "1"
    assert value_of(1, "colours") == "0"
    parts = units(base()[0])
    bits = bits_of(parts[1])
    start, stop = spans(1, bits)["full_range"][0], spans(1, bits)["colours"][1]
    parts[1] = unit_of(parts[1][:2], bits[:start] + full_range + colours + bits[stop:])
    if good:
        accepted(joined(parts), HEVC)  # the same values: nothing is converted
    else:
        refused(joined(parts), HEVC)


@covers("HEV-4")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_parameter_sets_that_end_too_early_or_late(number: int) -> None:
    parts = units(base()[0])
    whole = parts[number]
    if number:  # of the VPS only the first part is read
        refused(joined([*parts[:number], whole + b"\x80", *parts[number + 1 :]]), HEVC)
    for size in (3, 4, 8):
        cut = whole[:size].rstrip(b"\0") + b"\x80"
        refused(joined([*parts[:number], cut, *parts[number + 1 :]]), HEVC)
