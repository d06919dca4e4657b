"""``kvformat integration``: what is printed can be used as it is."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from typing import Any

import pytest
from click.testing import CliRunner

from kvformat.cli.program import cli
from kvformat.integrations.lmcache import geometry
from kvformat.integrations.settings import parse
from kvformat.integrations.vllm import options


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["integration", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def commands(text: str) -> list[list[str]]:
    """The shell's words of each command."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [shlex.split(part) for part in "\n".join(lines).split("\n\n") if part.strip()]


def option(words: list[str], name: str) -> Any:
    return json.loads(words[words.index(name) + 1])


@pytest.mark.parametrize("load", options.LOADS)
def test_vllm(load: str) -> None:
    ((program, verb, model, *rest),) = commands(
        printed("vllm", "--store", "/tmp/it's", "--model", "acme/x", "--load", load)
    )
    assert (program, verb, model) == ("vllm", "serve", "acme/x")
    transfer = option(rest, "--kv-transfer-config")
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert import_module(transfer["kv_connector_module_path"]).__name__ == options.MODULE
    found = parse(transfer["kv_connector_extra_config"], options.OWN_SETTINGS)
    assert (found.url, found.options.quality) == ("/tmp/it's", "near-lossless")
    assert found.own == {"load": load}


@pytest.mark.parametrize(
    ("target", "name", "more"),
    [
        ("vllm", "--kv-transfer-config", []),
        ("vllm-lmcache", "--l2-adapter", ["--quality", "balanced"]),
    ],
)
def test_a_calibration_profile(target: str, name: str, more: list[str]) -> None:
    first, *_ = commands(printed(target, "--profile", "/p/own.kvp", *more))
    said = option(first, name)
    settings = said.get("kv_connector_extra_config") or said["adapter_params"]
    own = options.OWN_SETTINGS if target == "vllm" else geometry.OWN_SETTINGS
    assert parse(settings, own).options.profile == "/p/own.kvp"


def test_a_profile_for_an_exact_store_is_refused() -> None:
    result = CliRunner().invoke(cli, ["integration", "vllm-lmcache", "--profile", "a.kvp"])
    assert result.exit_code == 64
    assert "a lossy quality" in result.output


@pytest.mark.parametrize(
    ("more", "quality", "mixed"),
    [([], "exact", False), (["--quality", "balanced"], "balanced", True)],
)
def test_vllm_with_lmcache(more: list[str], quality: str, mixed: bool) -> None:
    server, engine = commands(printed("vllm-lmcache", "--heads", "8", "--head-dim", "128", *more))
    adapter = option(server, "--l2-adapter")
    found = parse(adapter["adapter_params"], geometry.OWN_SETTINGS)
    assert (found.options.quality, found.options.mixed) == (quality, mixed)
    assert geometry.Geometry.parse(found.own) == geometry.Geometry("kv", 8, 128)
    port = server[server.index("--port") + 1]
    extra = option(engine, "--kv-transfer-config")["kv_connector_extra_config"]
    assert str(extra["lmcache.mp.port"]) == port
    assert found.own["hash_algorithm"] == server[server.index("--hash-algorithm") + 1]


def test_json_is_the_same_configuration() -> None:
    said = json.loads(printed("vllm", "--json"))
    ((*_, text),) = commands(printed("vllm"))
    assert said["kv_transfer_config"] == json.loads(text)


def test_half_a_geometry_is_refused() -> None:
    result = CliRunner().invoke(cli, ["integration", "vllm-lmcache", "--heads", "8"])
    assert result.exit_code == 64
