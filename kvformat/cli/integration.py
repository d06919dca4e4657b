"""``kvformat integration``: print the launch configuration of a serving engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Final

import click

from kvformat.cli.text import write_json
from kvformat.integrations.settings import parse
from kvformat.planning import DEFAULT_QUALITY, RELATIVE_STEPS
from kvformat.tracks import EXACT

TARGETS: Final = ("vllm", "vllm-lmcache")
QUALITIES: Final = (*RELATIVE_STEPS, EXACT)
HASH: Final = "blake3"
LMCACHE_PORT: Final = 5555
LMCACHE_L1_GB: Final = 20
QUALITY_HELP: Final = "Of what is stored; by default near-lossless for vllm, exact with LMCache."
PROFILE_HELP: Final = (
    "Calibration profile to write and read with (kvformat calibrate). LMCache takes only one for "
    "keys that are not rotated: it does not say at which positions they are."
)
LOADS_HELP: Final = "async: loads run beside other requests; layerwise: layer 0 starts early."


@click.command(name="integration")
@click.argument("target", type=click.Choice(TARGETS))
@click.option("--store", "url", default="/var/cache/kv", show_default=True, metavar="URL",
              help="Directory or fsspec URL of the store.")  # fmt: skip
@click.option("--model", default="MODEL", metavar="MODEL", help="Model to serve.")
@click.option("--quality", type=click.Choice(QUALITIES), help=QUALITY_HELP)
@click.option("--profile", metavar="FILE", help=PROFILE_HELP)
@click.option("--load", type=click.Choice(["async", "layerwise"]), default="async",
              show_default=True, help=LOADS_HELP)  # fmt: skip
@click.option("--heads", type=int, help="vllm-lmcache: KV heads of one rank.")
@click.option("--head-dim", type=int, help="vllm-lmcache: width of a head.")
@click.option("--json", "as_json", is_flag=True, help="Print only the configuration, as JSON.")
def command(
    target: str,
    url: str,
    model: str,
    *,
    quality: str | None,
    profile: str | None,
    load: str,
    heads: int | None,
    head_dim: int | None,
    as_json: bool,
) -> None:
    """Print how to launch vLLM with a store of KV caches, ready to use.

    vllm: vLLM's own connector. vllm-lmcache: vLLM with a server of LMCache, for which the store is
    the second level.
    """
    if target == "vllm":
        transfer = vllm_transfer(url, quality or DEFAULT_QUALITY, load, profile)
        configuration = {"kv_transfer_config": transfer}
        show: Callable[[dict[str, Any], str], str] = vllm_text
    else:
        configuration = {
            "l2_adapter": lmcache_adapter(url, quality or EXACT, heads, head_dim, profile),
            "kv_transfer_config": lmcache_transfer(),
        }
        show = lmcache_text
    if as_json:
        write_json(configuration)
    else:
        sys.stdout.write(show(configuration, model))


def vllm_transfer(url: str, quality: str, load: str, profile: str | None = None) -> dict[str, Any]:
    """vLLM's ``--kv-transfer-config`` for the connector."""
    from kvformat.integrations.vllm.options import MODULE, NAME, OWN_SETTINGS

    extra = {"url": url, "quality": quality, "load": load}
    extra |= {} if profile is None else {"profile": profile}
    parse(extra, OWN_SETTINGS)
    return {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def lmcache_adapter(
    url: str,
    quality: str,
    heads: int | None,
    head_dim: int | None,
    profile: str | None = None,
) -> dict[str, Any]:
    """LMCache's ``--l2-adapter``."""
    from kvformat.integrations.lmcache.geometry import OWN_SETTINGS, Geometry

    params: dict[str, Any] = {"url": url, "quality": quality, "hash_algorithm": HASH}
    if quality != EXACT:
        params["mixed"] = True
    params |= {} if profile is None else {"profile": profile}
    params |= {} if heads is None else {"heads": heads}
    params |= {} if head_dim is None else {"head_dim": head_dim}
    Geometry.parse(parse(params, OWN_SETTINGS).own)
    return {
        "type": "plugin",
        "module_path": "kvformat.integrations.lmcache",
        "class_name": "KvformatL2Adapter",
        "adapter_params": params,
    }


def lmcache_transfer() -> dict[str, Any]:
    """vLLM's ``--kv-transfer-config`` for a server of LMCache on this machine."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": LMCACHE_PORT,
        },
    }


def vllm_text(configuration: dict[str, Any], model: str) -> str:
    """For the shell, with what one must know."""
    transfer = configuration["kv_transfer_config"]
    quality = transfer["kv_connector_extra_config"]["quality"]
    return f"""\
# vLLM 0.32 or 0.33, with kvformat in the same environment.
vllm serve {model} --kv-transfer-config '{_json(transfer)}'

{_about_quality(quality)}
# Blocks of the engine (--block-size) must divide 256. One group of full-attention or MLA layers;
# caches in the model's own dtype. Other models and settings are refused at the start, by name.
# More in kv_connector_extra_config: limit_bytes, codec, salt_env (variable with the tenant's
# secret), model_id, revision, weights_digest, topologies (["tp2pp1"]: parts of others to load),
# save (false: only load), load_deadline_s, storage_options, profile and profiles (calibration
# profiles: one to write with, places of others to read with; with either, KV is stored apart from
# that of engines without). An unknown key is refused.
"""


def lmcache_text(configuration: dict[str, Any], model: str) -> str:
    """For the shell, with what one must know."""
    adapter = configuration["l2_adapter"]
    params = adapter["adapter_params"]
    opaque = "heads" not in params
    note = (
        "# Without --heads and --head-dim objects are opaque bytes: exact, hardly smaller.\n"
        "# They must be those of one rank, and its objects [2, layers, tokens, heads x dim]."
        if opaque
        else _about_quality(params["quality"])
        if params["quality"] == EXACT
        else f"# {params['quality']}: lossy, and computed on top of lossy KV. All of it says so."
    )
    return f"""\
# LMCache 0.5.6 or later in multi-process mode, with kvformat in the environment of its server.
# On a CPU add: --supported-transfer-mode engine_driven
lmcache server --host 127.0.0.1 --port {LMCACHE_PORT} --l1-size-gb {LMCACHE_L1_GB} \\
  --hash-algorithm {HASH} --eviction-policy LRU --l2-adapter '{_json(adapter)}'

vllm serve {model} --kv-transfer-config '{_json(configuration["kv_transfer_config"])}'

{note}
# The keys are LMCache's own: artifacts say that their tokens are not verified.
"""


def _about_quality(quality: str) -> str:
    if quality == EXACT:
        return "# exact: restored bit by bit; 1.3 to 1.5 times smaller for bfloat16."
    return (
        f"# {quality}: lossy. What is computed on top of it is not stored again, unless "
        '"mixed": true.\n# "quality": "exact" restores bit by bit, at about three times the size.'
    )


def _json(value: dict[str, Any]) -> str:
    """JSON for single quotes of a shell."""
    return json.dumps(value, indent=2).replace("'", "'\"'\"'")
