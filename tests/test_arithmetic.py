"""Restoring values: every bit is that of section 9.4, whatever the parameters and the machine."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvformat
from kvformat import quant
from tests.builder import Builder
from tests.reference import DTYPES, LARGEST, finite_values, reference_restore, restore_values
from tests.requirements import covers
from tests.strategies import FLOATS, canonical_kv, write_bytes

Array = NDArray[Any]
many = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
f32 = np.float32


def restored(q: Array, name: str, **parameters: Any) -> Array:
    """``quant.restore`` as bit patterns."""
    out = np.full(q.shape, 7, np.uint8).astype(DTYPES[name])
    quant.restore(q, out, **parameters)
    return out.view(f"u{out.dtype.itemsize}")


def expected(q: Array, name: str, **parameters: Any) -> Array:
    """The reference for the same arguments."""
    found = {key: parameters.get(key) for key in ("scale", "zero", "bias", "token_scale")}
    for key in ("scale", "zero", "bias"):
        if found[key] is not None:
            found[key] = found[key][:, None]
    return restore_values(q, name=name, **found)


def random_parameters(
    seed: int, shape: tuple[int, ...], spread: int
) -> tuple[Array, dict[str, Any]]:
    """Integers and parameters anywhere in the ranges of SET-4 and SET-5, ends included."""
    rng = np.random.default_rng(seed)
    layers, tokens, heads, dims = shape
    full = (layers, heads, dims)

    def powers(low: int, high: int, size: tuple[int, ...]) -> Array:
        low, high = max(low, -spread), min(high, spread)
        exponents = rng.integers(low, high, size, endpoint=True).astype(np.float64)
        mantissas = np.where(rng.random(size) < 0.2, 1.0, 1 + rng.random(size))
        return np.minimum(np.exp2(exponents) * mantissas, 2.0**high).astype(f32)

    q = rng.integers(0, 256, shape, np.uint8)
    zero = rng.integers(-32_768, 32_767, full, np.int16, endpoint=True)
    zero = np.where(rng.random(full) < 0.7, rng.integers(0, 256, full), zero).astype(np.int16)
    bias = powers(-64, 96, full) * np.where(rng.random(full) < 0.5, f32(-1), f32(1))
    bias = np.where(rng.random(full) < 0.2, f32(0), bias).astype(f32)
    parameters = {
        "scale": powers(-40, 40, full),
        "zero": zero,
        "bias": bias,
        "token_scale": powers(-40, 40, (layers, tokens)),
    }
    return q, parameters


# --- against the reference -------------------------------------------------------------------


@covers("ARI-1", "ARI-2", "ARI-3", "ARI-4", "ARI-6")
@pytest.mark.parametrize("name", FLOATS)
@many
@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(*(st.integers(1, n) for n in (2, 9, 3, 20))),
    spread=st.sampled_from([3, 12, 24, 128]),
    absent=st.sets(st.sampled_from(["bias", "token_scale"])),
    per_layer=st.booleans(),
)
def test_any_parameters(
    name: str, *, seed: int, shape: Any, spread: int, absent: set[str], per_layer: bool
) -> None:
    q, parameters = random_parameters(seed, shape, spread)
    for key in absent:
        parameters[key] = None
    if per_layer:
        parameters["scale"] = parameters["scale"][:, :1, :1]
        parameters["zero"] = parameters["zero"][:, :1, :1]
    assert np.array_equal(restored(q, name, **parameters), expected(q, name, **parameters))


EDGES = {
    "smallest product": (2.0**-40, 0, None, 2.0**-40),
    "largest product": (2.0**40, -32_768, None, 2.0**40),
    "largest product, negative": (2.0**40, 32_767, None, 2.0**40),
    "largest bias": (2.0**40, -32_768, 2.0**96, 2.0**40),
    "largest bias, negative": (2.0**40, 32_767, -(2.0**96), 2.0**40),
    "smallest bias": (2.0**-40, 128, 2.0**-64, 2.0**-40),
    "smallest bias, negative": (2.0**-40, 128, -(2.0**-64), 2.0**-40),
    "cancelling": (1.0, 128, -3.0, 1.0),
    "no bias": (1.0, 128, 0.0, 1.0),
    "float16 subnormals": (2.0**-25, 128, None, 1.0),
    "float16 subnormals with bias": (2.0**-26, 128, 2.0**-24 * 3, 1.0),
    "below float16": (2.0**-30, 128, None, 1.0),
    "float8_e4m3fn subnormals": (2.0**-11, 128, None, 1.0),
    "float8_e5m2 subnormals": (2.0**-18, 128, None, 1.0),
    "around 65,504": (0.25, 0, 65_490.0, 1.0),
    "around 65,520": (1.0, 0, 65_400.0, 1.0),
    "around 448": (1.0, 0, 330.0, 1.0),
    "around -448": (1.0, 255, -330.0, 1.0),
    "around 57,344": (64.0, 0, 50_000.0, 1.0),
    "ties of bfloat16": (2.0**-8, 0, 1.0, 1.0),
    "ties of float16": (2.0**-11, 0, 1.0, 1.0),
    "ties of float8": (2.0**-5, 0, 1.0, 1.0),
    "negative ties": (2.0**-11, 255, -1.0, 1.0),
}


@covers("ARI-1", "ARI-2", "ARI-4", "ARI-6", "SET-4", "SET-5")
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge: str, name: str) -> None:
    scale, zero, bias, factor = EDGES[edge]
    q = np.arange(256, dtype=np.uint8).reshape(1, 4, 1, 64)
    parameters: dict[str, Any] = {
        "scale": np.full((1, 1, 1), scale, f32),
        "zero": np.full((1, 1, 1), zero, np.int16),
        "bias": None if bias is None else np.full((1, 1, 64), bias, f32),
        "token_scale": np.full((1, 4), factor, f32),
    }
    found = restored(q, name, **parameters)
    assert np.array_equal(found, expected(q, name, **parameters))
    values = found.view(DTYPES[name]).astype(np.float64)
    assert np.isfinite(values).all()
    assert np.abs(values).max() <= LARGEST[name]


@covers("ARI-4")
@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("float16", 65504.0, 0x7BFF), ("float16", 65519.0, 0x7BFF), ("float16", 1e30, 0x7BFF),
        ("float16", -1e30, 0xFBFF), ("float16", 2.0**-24, 0x0001), ("float16", 2.0**-25, 0x0000),
        ("float16", -(2.0**-25), 0x8000), ("float16", -(2.0**-40), 0x8000),
        ("float16", 2.0**-25 * 1.5, 0x0001), ("float16", 2.0**-24 * 1.5, 0x0002),
        ("float16", 2.0**-24 * 2.5, 0x0002), ("float16", 2.0**-14 - 2.0**-26, 0x0400),
        ("float16", 1 + 2.0**-11, 0x3C00), ("float16", 1 + 3 * 2.0**-11, 0x3C02),
        ("bfloat16", 2.0**95, 0x6F00), ("bfloat16", 1 + 2.0**-8, 0x3F80),
        ("bfloat16", 1 + 3 * 2.0**-8, 0x3F82), ("bfloat16", -1 - 2.0**-8, 0xBF80),
        ("float8_e4m3fn", 448.0, 0x7E), ("float8_e4m3fn", 464.0, 0x7E),
        ("float8_e4m3fn", 465.0, 0x7E), ("float8_e4m3fn", -1e9, 0xFE),
        ("float8_e4m3fn", 2.0**-9, 0x01), ("float8_e4m3fn", 2.0**-10, 0x00),
        ("float8_e4m3fn", -(2.0**-10), 0x80), ("float8_e4m3fn", 2.0**-9 * 1.5, 0x02),
        ("float8_e4m3fn", 1.0625, 0x38), ("float8_e4m3fn", 1.1875, 0x3A),
        ("float8_e5m2", 57344.0, 0x7B), ("float8_e5m2", 61440.0, 0x7B),
        ("float8_e5m2", 1e9, 0x7B), ("float8_e5m2", -1e9, 0xFB),
        ("float8_e5m2", 2.0**-16, 0x01), ("float8_e5m2", 2.0**-17, 0x00),
        ("float8_e5m2", -(2.0**-17), 0x80), ("float8_e5m2", 1.125, 0x3C),
        ("float8_e5m2", 1.375, 0x3E), ("float32", 1 + 2.0**-23, 0x3F800001),
    ],
)  # fmt: skip
def test_rounding_by_hand(name: str, value: float, code: int) -> None:
    bias = np.full((1, 1, 1), value, f32)
    assert float(bias[0, 0, 0]) == pytest.approx(value, rel=1e-7)
    q = np.full((1, 1, 1, 1), 128, np.uint8)
    zero = np.full((1, 1, 1), 128, np.int16)
    found = restored(q, name, scale=np.ones((1, 1, 1), f32), zero=zero, bias=bias)
    assert found.item() == code


@covers("ARI-4")
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_value_and_every_middle_of_a_dtype(name: str) -> None:
    values = finite_values(name)
    values = values[(values == 0) | ((values >= 2.0**-64) & (values <= 2.0**96))]
    middles = (values[1:] + values[:-1]) / 2
    around = [values, middles, np.nextafter(middles.astype(f32), f32(0)), -values[1:], -middles]
    points = np.concatenate([np.asarray(item, f32) for item in around])
    points = points[(points == 0) | (np.abs(points) >= 2.0**-64)]
    points[points == 0] = 0
    points = points[: len(points) // 8 * 8]
    q = np.full((1, 1, 8, len(points) // 8), 3, np.uint8)
    parameters: dict[str, Any] = {
        "scale": np.ones((1, 1, 1), f32),
        "zero": np.full((1, 1, 1), 3, np.int16),
        "bias": points.reshape(1, 8, -1),
    }
    assert np.array_equal(restored(q, name, **parameters), expected(q, name, **parameters))


# --- the order of operations -----------------------------------------------------------------


def operands(seed: int) -> tuple[Array, dict[str, Any]]:
    """Many products whose magnitude is like that of the bias."""
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 256, (1, 64, 2, 64), np.uint8)
    parameters = {
        "scale": rng.uniform(0.01, 0.1, (1, 2, 64)).astype(f32),
        "zero": np.full((1, 1, 1), 128, np.int16),
        "bias": rng.uniform(-4, 4, (1, 2, 64)).astype(f32),
        "token_scale": rng.uniform(0.5, 2, (1, 64)).astype(f32),
    }
    return q, parameters


@covers("ARI-2")
def test_no_fused_multiply_add() -> None:
    q, parameters = operands(1)
    parameters["token_scale"] = None
    whole = (q.astype(np.float64) - 128) * parameters["scale"][:, None].astype(np.float64)
    fused = (whole + parameters["bias"][:, None].astype(np.float64)).astype(f32)
    right = expected(q, "float32", **parameters)
    differs = fused.view(np.uint32) != right
    assert 0.05 < differs.mean() < 0.5  # the operands tell the two apart
    assert np.array_equal(restored(q, "float32", **parameters), right)


@covers("ARI-2")
def test_multiplications_go_from_left_to_right() -> None:
    q, parameters = operands(2)
    x = (q.astype(np.int64) - 128).astype(f32)
    both = parameters["scale"][:, None] * parameters["token_scale"][:, :, None, None]
    other = (x * both).astype(f32) + parameters["bias"][:, None]
    right = expected(q, "float32", **parameters)
    assert (other.view(np.uint32) != right).mean() > 0.05
    assert np.array_equal(restored(q, "float32", **parameters), right)


@covers("ARI-1")
def test_the_subtraction_is_one_of_integers() -> None:
    q = np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 256)
    for zero in (-32_768, -1, 0, 1, 255, 256, 32_767):
        parameters: dict[str, Any] = {
            "scale": np.ones((1, 1, 1), f32), "zero": np.full((1, 1, 1), zero, np.int16)
        }  # fmt: skip
        found = restored(q, "float32", **parameters).view(f32)
        assert np.array_equal(found[0, 0, 0], np.arange(256) - zero)


@covers("ARI-3")
def test_absent_terms_are_skipped_not_neutral() -> None:
    q = np.full((1, 1, 1, 1), 128, np.uint8)
    one, zero = np.ones((1, 1, 1), f32), np.full((1, 1, 1), 128, np.int16)
    assert restored(q, "float32", scale=one, zero=zero).item() == 0
    q[...] = 127
    tiny = np.full((1, 1, 1), 2.0**-40, f32)
    assert restored(q, "float16", scale=tiny, zero=zero).item() == 0x8000


@covers("ARI-6", "SET-6", "PAR-1")
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("memory", [(0, 1, 2, 3), (0, 3, 2, 1), (0, 2, 3, 1), (3, 2, 1, 0)])
def test_memory_order_and_rank_order_change_nothing(name: str, memory: tuple[int, ...]) -> None:
    q, parameters = random_parameters(5, (2, 70, 3, 33), 12)
    right = expected(q, name, **parameters)
    turned = np.ascontiguousarray(q.transpose(memory)).transpose(np.argsort(memory))
    assert np.array_equal(restored(turned, name, **parameters), right)
    rng = np.random.default_rng(6)
    order = np.argsort(rng.random((2, 3, 33)), axis=-1)
    inverse = np.argsort(order, axis=-1)
    ranked = np.take_along_axis(q, order[:, None], axis=3)
    ranked = np.ascontiguousarray(ranked.transpose(memory)).transpose(np.argsort(memory))
    assert np.array_equal(restored(ranked, name, order=inverse, **parameters), right)
    out = np.zeros(q.shape[::-1], DTYPES[name]).transpose()
    quant.restore(ranked, out, order=inverse, **parameters)
    assert np.array_equal(np.ascontiguousarray(out).view(right.dtype), right)


# --- flush-to-zero ---------------------------------------------------------------------------


def flush_to_zero() -> bool:
    """Make this thread flush subnormals to zero; says whether that worked."""
    places = {"x86_64": (28, 4, 0x8040), "aarch64": (0, 4, 1 << 24)}  # MXCSR, FPCR in fenv_t
    if platform.machine() not in places or platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    place, size, flags = places[platform.machine()]
    state = ctypes.create_string_buffer(64)
    library.fegetenv(state)
    word = int.from_bytes(state.raw[place : place + size], "little") | flags
    ctypes.memmove(ctypes.byref(state, place), word.to_bytes(size, "little"), size)
    library.fesetenv(state)
    tiny = np.full(64, 2.0**-120, f32)
    return not (tiny * np.full(64, 2.0**-20, f32)).any()


def in_flushing_thread(work: Callable[[], Any]) -> Any:
    """``work()`` on a thread that flushes subnormals; skips where that cannot be had."""
    result: list[Any] = []

    def run() -> None:
        if flush_to_zero():
            result.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if not result:
        pytest.skip("this machine's floating-point state cannot be changed through fesetenv")
    return result[0]


@covers("ARI-2", "ARI-4", "ARI-6")
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("spread", [12, 40, 128])
def test_flush_to_zero_changes_nothing(name: str, spread: int) -> None:
    q, parameters = random_parameters(spread, (2, 70, 2, 64), spread)
    flushed = in_flushing_thread(lambda: restored(q, name, **parameters))
    assert np.array_equal(flushed, expected(q, name, **parameters))


@covers("ARI-4", "ARI-6")
@pytest.mark.parametrize(
    "edge", [edge for edge in EDGES if "subnormals" in edge or "small" in edge]
)
@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_flush_to_zero_keeps_subnormal_results(edge: str, name: str) -> None:
    flag = in_flushing_thread(lambda: (test_edges(edge, name), True)[1])
    assert flag


@covers("ARI-5", "ARI-6")
@pytest.mark.parametrize("track", ["near-lossless/zstd", "near-lossless/hevc", "exact/zstd"])
def test_flush_to_zero_when_reading_a_file(track: str) -> None:
    kv = (canonical_kv(2, 30, 2, 16).astype(f32) * f32(2.0**-18)).astype(np.float16)
    kv[:, :, :2] = np.float16(6e-8)  # subnormal, and patches
    file = write_bytes(kv, tracks=[track])

    def read() -> bytes:
        with kvformat.open(file) as artifact:
            return artifact.read(check=True, workers=1).kv.tobytes()

    values = reference_restore(file)[track]
    assert in_flushing_thread(read) == values["key"].tobytes() + values["value"].tobytes()


@covers("ARI-6", "SET-4", "SET-5")
def test_extreme_sets_restore_through_a_file() -> None:
    builder = Builder(
        write_bytes(canonical_kv(2, 8, 2, 4, name="float16"), tracks=["zstd", "stored"])
    )
    for item in builder.sets["near-lossless"]:
        scale = np.array([2.0**-40, 2.0**40], f32).tobytes()
        zero = np.array([-32_768, 32_767], np.int16).tobytes()
        bias = np.resize(np.array([0, 2.0**-64, -(2.0**96), 1.5], f32), 16).tobytes()
        factors = np.resize(np.array([2.0**-40, 1, 2.0**40], f32), 33).tobytes()
        head, order = item.data[:16], item.data[-33 * 4 - 16 : -33 * 4]
        assert len(head + scale + zero + bias + order + factors) == len(item.data)
        item.data = head + scale + zero + bias + order + factors
    file = builder.build()
    values = reference_restore(file)
    with kvformat.open(file) as artifact:
        for track in artifact.tracks:
            restored_kv = artifact.read(track=track).kv
            assert restored_kv[0].tobytes() == values[track]["key"].tobytes()
            assert np.isfinite(restored_kv.astype(f32)).all()
