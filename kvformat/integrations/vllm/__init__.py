"""vLLM: a KV connector that stores finished prompts and loads the longest stored prefix.

::

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "KvformatConnector",
      "kv_connector_module_path": "kvformat.integrations.vllm",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"url": "/var/cache/kv"}}'

``kvformat integration vllm`` prints this with all settings explained. Only ``connector`` and
``layout`` need torch and vLLM; the rest is plain and can be tested without an engine.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "KvformatConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvformat.integrations.vllm.connector import KvformatConnector

    return KvformatConnector
