"""All codecs by name: one line each."""

from __future__ import annotations

from kvformat.codecs.base import Codec
from kvformat.codecs.hevc import HevcCodec
from kvformat.codecs.stored import StoredCodec
from kvformat.codecs.zstd import ZstdCodec

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (HevcCodec(), ZstdCodec(), StoredCodec())
}
