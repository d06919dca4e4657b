"""Mutants of the codecs and of the layout of pictures."""

from __future__ import annotations

from typing import Final

from conformance.mutants.texts import Row, rows, skipped

STORED: Final = rows(
    "codecs.stored",
    (
        "stored-trailing-bytes",
        "        del strict\n",
        "        del strict\n        payload = payload[: shape.integers_bytes]\n",
        "bytes behind the integers are ignored",
        "sto-0002*",
    ),
)

ZSTD: Final = (
    *rows(
        "codecs.zstd_codec",
        (
            "zstd-trailing-data",
            "allow_extra_data=False",
            "allow_extra_data=True",
            "bytes behind a zstd frame are ignored",
            "zst-0075* zst-0073*",
        ),
        (
            "zstd-dictionary",
            "_FORBIDDEN_FLAGS = 0x1F",
            "_FORBIDDEN_FLAGS = 0x1C",
            "a frame may name a dictionary",
            "zst-0058* zst-0059*",
        ),
        (
            "zstd-unused-bit",
            "_FORBIDDEN_FLAGS = 0x1F",
            "_FORBIDDEN_FLAGS = 0x0F",
            "the unused bit of a frame may be set",
            "zst-0061*",
        ),
        (
            "zstd-content-size-trusted",
            "        if header.content_size != size:\n"
            '            _refuse("frame content size is wrong", where, size, '
            "header.content_size)\n",
            "        bytearray(min(header.content_size, 2**31))\n",
            "what a frame says of its size is allocated before it is compared",
            "zst-0100*",
        ),
        (
            "zstd-window",
            "MAX_WINDOW = 8 << 20",
            "MAX_WINDOW = 1 << 30",
            "a frame may ask for a window above 8 MiB",
            "zst-0062*",
        ),
        skipped(
            "zstd-frame-without-rows",
            "frame_count and int(counts.min()) < 1",
            "a frame may hold no rows",
            "zst-0037*",
        ),
        skipped(
            "zstd-bytes-behind-frames",
            "int(sizes.sum()) != len(view) - offset",
            "bytes behind the last frame are ignored",
            "zst-0041* zst-0042*",
        ),
        skipped(
            "zstd-rows-missing",
            "int(counts.sum()) != most",
            "frames need not hold all rows",
            "zst-0036* zst-0039*",
        ),
        (
            "zstd-span",
            "if radix > MAX_PACKED_RADIX and (low, radix) != (0, 256):",
            "if False:",
            "any radix passes",
            "zst-0083* zst-0085*",
        ),
        skipped("zstd-span-past-255", "low + radix > 256", "low + radix may pass 256", "zst-0088*"),
        skipped(
            "zstd-packed-byte",
            "peak >= radix**per_byte",
            "packed bytes that stand for no digits pass",
            "zst-0091*",
        ),
        (
            "zstd-row-filler",
            "if left and int(content[width - 1 :: width].max()) >= radix**left:",
            "if False:",
            "digits behind the last token may be anything",
            "zst-0090*",
        ),
        (
            "zstd-seven-a-byte",
            "while count < 8 and",
            "while count < 7 and",
            "at most seven values share a byte",
            "zst-0001* zst-0002*",
        ),
        (
            "zstd-digits-reversed",
            "powers = radix ** np.arange(per_byte)",
            "powers = radix ** np.arange(per_byte)[::-1]",
            "the first token is the highest digit",
            "zst-0004* zst-0002*",
        ),
        (
            "zstd-low-ignored",
            "// powers % radix + low)",
            "// powers % radix)",
            "low is not added",
            "zst-0004* zst-0003*",
        ),
        (
            "zstd-checksum",
            "_FORBIDDEN_FLAGS = 0x1F",
            "_FORBIDDEN_FLAGS = 0x1B",
            "a frame may have a checksum",
            "zst-0110*",
        ),
    ),
    *rows(
        "codecs.zstd",
        (
            "zstd-rows-by-head",
            "        view = rows.reshape(shape.layers, shape.head_dim, shape.heads, shape.tokens)\n"
            "        return Decoded(view.transpose(0, 3, 2, 1), ranked=True)",
            "        view = rows.reshape(shape.layers, shape.heads, shape.head_dim, shape.tokens)\n"
            "        return Decoded(view.transpose(0, 3, 1, 2), ranked=True)",
            "rows are ordered by head, then rank",
            "zst-0004* grp-0001*",
        ),
        (
            "zstd-planes-swapped",
            "np.copyto(wide if plane else total, planes[plane])",
            "np.copyto(wide if plane else total, planes[shape.item_bytes - 1 - plane])",
            "byte planes of exact values are swapped",
            "zst-0031*",
        ),
    ),
)

LAYOUT: Final = rows(
    "layout",
    (
        "picture-order-swapped",
        'axes = (1, 4, 0, 3, 6, 2, 5) if la.order == "time"',
        'axes = (1, 4, 0, 3, 6, 2, 5) if la.order != "time"',
        "time and raster are swapped",
        "lay-0001* lay-0004*",
    ),
    (
        "fold-transposed",
        '(1, 4, 0, 3, 6, 2, 5) if la.order == "time" else (0, 1, 4, 3, 6, 2, 5)',
        '(1, 4, 0, 6, 3, 2, 5) if la.order == "time" else (0, 1, 4, 6, 3, 2, 5)',
        "tokens of a fold run down instead of across",
        "lay-0003* lay-0006*",
    ),
    (
        "cells-transposed",
        '(1, 4, 0, 3, 6, 2, 5) if la.order == "time" else (0, 1, 4, 3, 6, 2, 5)',
        '(4, 1, 0, 3, 6, 2, 5) if la.order == "time" else (0, 4, 1, 3, 6, 2, 5)',
        "cells of a picture run down instead of across",
        "lay-0009*",
    ),
    (
        "filler-behind-the-channels",
        "return everywhere == addressed",
        "return everywhere >= addressed",
        "filler in a plane that is used may be anything",
        "lay-0049* lay-0050*",
    ),
)


def _need(name: str, call: str, new: str, breaks: str, hints: str) -> Row:
    """A field of a parameter set that is read and not compared."""
    return (f"hevc-{name}", f"    {call}", f"    {new}", breaks, hints)


HEVC: Final = (
    *rows(
        "codecs.hevc",
        (
            "hevc-unused-planes",
            "used and bool((planes[:, shape.layers :] == FILLER).all())",
            "used",
            "planes without a layer may be anything",
            "lay-0048*",
        ),
    ),
    *rows(
        "codecs.bitstream",
        (
            "hevc-md5-not-required",
            "pictures = _count_pictures(data, units[3:], where)",
            "pictures = sum(\n        1\n        for unit in units[3:]\n"
            "        if unit.kind != _HASH_SEI and data[unit.start + 2] & 0x80\n    )",
            "pictures need no MD5 message",
            "hev-0014* hev-0020*",
        ),
        (
            "hevc-any-hash",
            "if len(body) != _HASH_BYTES or body[:3] != _HASH_HEAD or body[-1] != 0x80:",
            "if False:",
            "a CRC or checksum stands for the MD5 message",
            "hev-0015* hev-0016*",
        ),
        (
            "hevc-unit-types",
            "if strange := sorted(set(kinds[3:]) - _SLICES - {_HASH_SEI}):",
            "units = [unit for unit in units if unit.kind in (*range(32), 32, 33, 34, 40)]\n"
            "    if strange := False:",
            "units of any type are ignored",
            "hev-0017* hev-0030* hev-0031*",
        ),
        (
            "hevc-start-code",
            'if mark not in (0, 1) or data[:mark].strip(b"\\0"):',
            "if mark < 0:",
            "bytes in front of the first start code are ignored",
            "hev-0042* hev-0039*",
        ),
        (
            "hevc-layers",
            "if head & 0x81 or data[start + 1] != 1:",
            "if head & 0x80:",
            "units of other layers and sub-layers pass",
            "hev-0036* hev-0037* hev-0033* hev-0034*",
        ),
        _need(
            "bypass",
            '_need("transquant_bypass_enabled_flag", bits.u(1), 1, where)',
            "bits.u(1)",
            "the stream may be lossy",
            "hev-0013*",
        ),
        _need(
            "long-term-references",
            '_need("long_term_ref_pics_present_flag", bits.u(1), 0, where)',
            "_ = bits.u(1) and bits.ue()",
            "long-term references pass",
            "hev-0076*",
        ),
        _need(
            "two-references",
            '_need("num_negative_pics > 1", int(earlier > 1), 0, where)',
            "pass",
            "pictures may refer to several earlier ones",
            "hev-0084*",
        ),
        _need(
            "later-references",
            '_need("num_positive_pics", later, 0, where)',
            "earlier += later",
            "pictures may refer to later ones",
            "hev-0085*",
        ),
        _need(
            "reordered",
            '_need("sps_max_num_reorder_pics", bits.ue(), 0, where)',
            "bits.ue()",
            "pictures may be reordered",
            "hev-0072* hev-0098*",
        ),
        _need(
            "field-sequences",
            '_need("field_seq_flag", bits.u(1), 0, where)',
            "bits.u(1)",
            "fields pass",
            "hev-0077*",
        ),
        _need(
            "end-of-sps",
            '_need("end of the SPS", int(bits.at_end()), 1, where)',
            "pass",
            "bytes behind the SPS are ignored",
            "hev-0094*",
        ),
        _need(
            "end-of-pps",
            '_need("end of the PPS", int(bits.at_end()), 1, where)',
            "pass",
            "bytes behind the PPS are ignored",
            "hev-0096*",
        ),
        (
            "hevc-zero-behind",
            "if stop - start < _SLICE_HEADER_BYTES or data[stop - 1] == 0:",
            "if stop - start < _SLICE_HEADER_BYTES:",
            "a zero behind a unit passes",
            "hev-0110*",
        ),
        (
            "hevc-one-unit-fewer",
            "3 + frames * (SLICES_PER_PICTURE + 1)",
            "2 + frames * (SLICES_PER_PICTURE + 1)",
            "a stream with as many units as HEV-15 allows is refused",
            "hev-*-units-at-the-limit",
        ),
        (
            "hevc-one-unit-more",
            "3 + frames * (SLICES_PER_PICTURE + 1)",
            "4 + frames * (SLICES_PER_PICTURE + 1)",
            "one unit more than HEV-15 allows passes",
            "hev-*-units-above-the-limit",
        ),
    ),
)

MUTANTS: Final = (*STORED, *ZSTD, *LAYOUT, *HEVC)
