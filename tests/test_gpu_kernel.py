"""The fused kernel: exact in Triton's interpreter, compiled for three architectures, PTX read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import kvformat
import kvformat.gpu as on_device
from kvformat.gpu.compiling import suspicious
from kvformat.gpu.engine import Engine
from kvformat.gpu.sources import array_source, frame_source
from kvformat.gpu.sums import DeviceSum
from tests.builder import integer_sum
from tests.gpu_samples import bits, pictures, torch
from tests.strategies import FLOATS, canonical_kv, write_bytes
from tests.test_gpu_restore import TRACKS, build, cases, run


@settings(deadline=None, max_examples=25)
@given(cases())
def test_the_kernel_gives_the_bits_of_the_reference(case: dict[str, Any]) -> None:
    segment, q, expected = build(case)
    with Engine("cpu", restorer="triton") as engine:
        assert engine.fused
        for how in ("pictures", "array"):
            out = torch.empty(expected.shape, dtype=getattr(torch, case["dtype"]))
            run(segment, q, case["part"], out, engine=engine, how=how)
            assert bits(out) == bits(expected)


@pytest.mark.parametrize("name", FLOATS)
def test_files_of_every_codec_through_the_kernel(name: str) -> None:
    data = write_bytes(canonical_kv(4, 40, 2, 16, name=name), tracks=TRACKS, segment_tokens=32)
    with kvformat.open(data) as artifact, Engine("cpu", restorer="triton") as engine:
        for track in artifact.tracks:
            found = on_device.read(artifact, engine=engine, track=track, check=True)
            assert bits(found.kv) == bits(artifact.read(track=track).kv)


@settings(deadline=None, max_examples=25)
@given(cases())
def test_the_sum_of_the_kernel_the_reference_and_the_formula(case: dict[str, Any]) -> None:
    segment, q, _ = build(case)
    context = segment.context
    made = torch.from_numpy(pictures(q, context))
    order = context.order()
    stored = q if order is None else np.take_along_axis(q, order[:, None].astype(int), axis=3)
    with Engine("cpu") as engine:
        for fused in (False, True):
            sources = [
                frame_source(tuple(made[index]), context.layout, index, engine.tables)
                for index in range(len(made))
            ]
            for batch in (sources, [array_source(tuple(engine.put(stored)), engine.tables)]):
                geometry = batch[0].geometry
                shape = (q.shape[0], *q.shape[2:])
                offsets = engine.tables.offsets(geometry, order, shape)
                total = DeviceSum(offsets, q.shape[1], fused=fused)
                for source in batch:
                    total.add(source)
                assert total.value() == integer_sum(q.tobytes())


def compiled(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, check=False
    )


def test_compiled_without_a_gpu_and_nothing_fused_or_flushed(tmp_path: Path) -> None:
    ended = compiled(tmp_path, "-m", "kvformat.gpu.compiling")
    assert ended.returncode == 0, ended.stderr.decode()
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert lines == [
        {"architecture": number, "kernels": 21, "suspicious": {}} for number in (80, 90, 120)
    ]


def test_fusion_would_be_found(tmp_path: Path) -> None:
    code = (
        "from kvformat.gpu import compiling, kernel\n"
        "kernel.OPTIONS['enable_fp_fusion'] = True\n"
        "made = compiling.compile_restore('float16', 90, scaled=True, biased=True)\n"
        "print(compiling.suspicious(made.asm['ptx']))\n"
    )
    ended = compiled(tmp_path, "-c", code)
    assert ended.stdout.decode().strip() == "['fma.rn.f32']", ended.stderr.decode()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", ["fma.rn.f32"]),
        ("mul.rn.ftz.f32 %f1, %f2, %f3;", ["mul.rn.ftz.f32"]),
        ("add.ftz.f32 %f1, %f2, %f3;", ["add.ftz.f32"]),
        ("mad.lo.s32 %r1, %r2, %r3, %r4;", []),
        ("mul.rn.f32 %f1, %f2, %f3;", []),
        ("cvt.rn.f32.s32 %f1, %r1;", []),
    ],
)
def test_what_is_suspicious(line: str, found: list[str]) -> None:
    assert suspicious(line) == found
