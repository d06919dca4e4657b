"""Check kvformat.gpu on a machine with an NVIDIA GPU and write a JSON report.

``python tools/gpu_check.py [--device cuda:0] [--json report.json]``; exit status 0 if all is exact,
1 if not, 69 where there is no usable GPU. Takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvformat.errors import KvformatError
from kvformat.gpu.checking import Check
from kvformat.gpu.libraries import as_device
from kvformat.gpu.nvdec import NvdecDecoder
from kvformat.gpu.pynv import PynvDecoder

KINDS: dict[str, Any] = {"nvdec": NvdecDecoder, "nvdec-pynv": PynvDecoder}


def summary(report: dict[str, Any]) -> str:
    """A line for each part."""
    lines = []
    for name, part in report.items():
        if isinstance(part, dict) and "seconds" in part:
            state = "ok" if part.get("ok", True) else "FAILED"
            lines.append(f"{name:12} {state:7} {part['seconds']:8.1f} s")
    lines.extend(
        f"  {row['decoder']}, {row['sessions']} sessions: {row['pool_pictures_per_s']} pictures/s "
        f"through the pool, {row['bare_pictures_per_s']} bare"
        for row in report.get("throughput", {}).get("rates", [])
    )
    return "\n".join([*lines, "all exact" if report["ok"] else "NOT all exact: read the report"])


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"))
    arguments = parser.parse_args()
    try:
        device = as_device(arguments.device)
    except KvformatError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    check = Check(device, lambda name, level: KINDS[name](device, level_idc=level))
    report = check.run()
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(summary(report))
    print(f"report: {arguments.json}")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
