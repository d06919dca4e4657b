"""The class that vLLM loads: its two halves are ``planning`` (scheduler) and ``worker``."""

from __future__ import annotations

import atexit
import logging
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

from kvformat.errors import UsageError
from kvformat.integrations.settings import parse
from kvformat.integrations.vllm.identity import cache_dtype, identity_of
from kvformat.integrations.vllm.layout import find_layout
from kvformat.integrations.vllm.options import LOADS, OWN_SETTINGS
from kvformat.integrations.vllm.orders import Orders
from kvformat.integrations.vllm.planning import Planner
from kvformat.integrations.vllm.topology import Model, Topology
from kvformat.integrations.vllm.topology import parse as parse_topology
from kvformat.integrations.vllm.transfers import Paged
from kvformat.integrations.vllm.views import Shape, Views
from kvformat.integrations.vllm.worker import Worker
from kvformat.integrations.vllm.writers import layer_number, writer_of
from kvformat.tokens import BLOCK_TOKENS

_log = logging.getLogger("kvformat.vllm")


class Step(KVConnectorMetadata):
    """The orders of one step, as vLLM carries them."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class KvformatConnector(KVConnectorBase_V1):
    """Stores finished prompts in a ``kvformat.store`` and loads the longest stored prefix.

    Raises ``UsageError`` while the engine starts, for settings and models that it cannot serve.
    Afterwards every fault is a miss.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = dict(self._kv_transfer_config.kv_connector_extra_config)
        self._settings = parse(extra, OWN_SETTINGS)
        self._load = self._settings.own.get("load", LOADS[0])
        if self._load not in LOADS:
            raise UsageError("usage.argument", "load is not understood",
                             expected=" or ".join(LOADS), found=ascii(self._load)[:40])  # fmt: skip
        self._block_tokens = self._checked_block_tokens(kv_cache_config)
        self._spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        options = self._settings.options
        self._identity = identity_of(
            vllm_config,
            self._settings.own,
            rotated=options.profile is not None or bool(options.profiles),
        )
        parallel = vllm_config.parallel_config
        self._topology = Topology(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self._model = self._whole_model()
        self._model.replicas(self._topology)
        self._store = self._settings.open()
        self._planner: Planner | None = None
        self._worker: Worker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._planner = Planner(
                Views(self._store, self._identity, self._settings.salt),
                self._model,
                self._topologies(),
                block_tokens=self._block_tokens,
                layerwise=self._load == "layerwise",
                save=bool(self._settings.own.get("save", True)),
            )
        self._closed = False
        atexit.register(self.shutdown)

    def _checked_block_tokens(self, kv_cache_config: KVCacheConfig) -> int:
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
            raise UsageError(
                "input.shape",
                "the connector supports one group of attention layers of equal shape",
                found=", ".join(type(group.kv_cache_spec).__name__ for group in groups),
            )
        latent = isinstance(groups[0].kv_cache_spec, MLAAttentionSpec)
        if latent and not self._vllm_config.scheduler_config.enable_chunked_prefill:
            # vLLM turns this off where its latent attention is wrong behind a cached prefix.
            raise UsageError(
                "input.shape", "this engine cannot compute behind a loaded prefix of latents",
                where="enable_chunked_prefill", expected=True, found=False,
            )  # fmt: skip
        policy = self._kv_transfer_config.kv_load_failure_policy
        if policy != "recompute":
            raise UsageError(
                "usage.argument", "a load that fails must not fail the request",
                where="kv_load_failure_policy", expected="recompute", found=ascii(policy),
            )  # fmt: skip
        block_tokens = int(groups[0].kv_cache_spec.block_size)
        if BLOCK_TOKENS % block_tokens:
            raise UsageError(
                "usage.argument", "the engine's blocks do not divide those of the format",
                where="block_size", expected=f"a divisor of {BLOCK_TOKENS}", found=block_tokens,
            )  # fmt: skip
        return block_tokens

    def _whole_model(self) -> Model:
        config = self._vllm_config.model_config
        latent = isinstance(self._spec, MLAAttentionSpec)
        heads = 1 if latent else int(config.get_total_num_kv_heads())
        return Model(self._identity.layers_total, heads, get_pp_indices)

    def _topologies(self) -> list[Topology]:
        """Ours first, then those whose parts we may load."""
        named = self._settings.own.get("topologies", ["tp1pp1"])
        others = [parse_topology(text) for text in named]
        fitting = [item for item in others if self._model.fits(item)]
        return list(dict.fromkeys([self._topology, *fitting]))

    # The scheduler's half.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As the base class says."""
        try:
            return self._plan().match(request, num_computed_tokens)
        except Exception:
            _log.exception("a lookup failed")
            return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As the base class says. It must not fail silently: the engine relies on the load."""
        if num_external_tokens:
            self._plan().allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """As the base class says."""
        return Step(self._plan().orders(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """As the base class says."""
        if connector_output.invalid_block_ids:
            self._plan().load_failed(connector_output.invalid_block_ids)

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002 - known from the steps
    ) -> tuple[bool, dict[str, Any] | None]:
        """As the base class says: blocks wait until their save has copied them."""
        return self._plan().finished(request), None

    # The workers' half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As the base class says; finds out how blocks are laid out, or raises ``UsageError``."""
        tp_rank, pp_rank = get_tensor_model_parallel_rank(), get_pp_group().rank_in_group
        part = self._model.part(self._topology, tp_rank, pp_rank)
        layers = {layer_number(name): name for name in kv_caches}
        if sorted(layers) != list(range(*part.layers)):
            raise UsageError(
                "input.shape", "this rank holds other layers than expected",
                expected=f"{part.layers[0]} to {part.layers[1] - 1}", found=str(sorted(layers)),
            )  # fmt: skip
        widths = self._widths()
        modules = self._vllm_config.compilation_config.static_forward_context
        layout = find_layout(
            kv_caches,
            {name: writer_of(modules[name]) for name in kv_caches},
            widths,
            part.heads[1] - part.heads[0],
            self._block_tokens,
        )
        caches = {number: kv_caches[name] for number, name in sorted(layers.items())}
        shape = Shape(cache_dtype(self._vllm_config), tuple(widths.items()))
        views = Views(self._store, self._identity, self._settings.salt, shape)
        writes = self._model.writes(self._topology, tp_rank)
        if writes and self._settings.own.get("save", True):
            self._store.require_profile(self._identity, shape.groups(part))
        self._worker = Worker(
            views,
            Paged(part, caches, layout, self._block_tokens),
            writes=writes,
            patience_s=self._store.options.load_deadline_s,
        )
        _log.info("layers %s, heads %s, layout %s", part.layers, part.heads, layout.describe())

    def _widths(self) -> dict[str, int]:
        if isinstance(self._spec, MLAAttentionSpec):
            return {"latent": int(self._spec.head_size)}
        return {"key": int(self._spec.head_size), "value": int(self._spec.head_size_v)}

    def _step(self) -> Orders:
        step = self._get_connector_metadata()
        return step.orders if isinstance(step, Step) else Orders()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """As the base class says."""
        if isinstance(kv_connector_metadata, Step) and self._worker is not None:
            self._worker.preempted(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """As the base class says."""
        if self._worker is not None:
            self._worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """As the base class says."""
        if self._worker is not None and self._load == "layerwise":
            self._worker.wait_for_layer(layer_number(layer_name))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole prompts are copied from the paged cache, see ``wait_for_save``."""

    def wait_for_save(self) -> None:
        """Start the saves of this step; blocks are kept until they are done."""
        if self._worker is not None:
            self._worker.start_saves(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """As the base class says."""
        if self._worker is None:
            return None, None
        return self._worker.finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """As the base class says."""
        return set() if self._worker is None else self._worker.take_bad_blocks()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Waiting for layers cannot be part of a captured graph."""
        return extra_config.get("load") == "layerwise"

    def shutdown(self) -> None:
        """Stop; what is queued for the encoder is written in ten seconds, or dropped."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        for half in (self._planner, self._worker):
            if half is not None:
                if half.counts:
                    _log.info("%s: %s", type(half).__name__, dict(half.counts))
                half.close()
        self._store.close()

    def _plan(self) -> Planner:
        if self._planner is None:
            raise RuntimeError("this half of the connector has no scheduler")
        return self._planner
