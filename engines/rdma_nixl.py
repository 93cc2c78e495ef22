"""NIXL behind the RDMA lane: an agent with a listener, over UCX.

The package is optional (extra `rdma`; its wheel asks for torch, which it does not need: `pip install --no-deps
nixl-cu13`).  Without a card UCX goes over TCP or shared memory, which is how this is tested.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from engines.rdma import AGENT_NAME, LaneUnavailable

_PACKAGES = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")


class NixlExporter:
    """An `engines.rdma.Exporter`.  Raises LaneUnavailable without the package, or when its listener cannot start."""

    def __init__(self, listen_port: int) -> None:
        api = _package()
        try:
            config = api.nixl_agent_config(enable_listen_thread=True, listen_port=listen_port, backends=["UCX"])
            self._agent = api.nixl_agent(AGENT_NAME, config)
        except Exception as error:  # whatever the binding raises
            raise LaneUnavailable(f"NIXL does not start: {error}") from error

    def register(self, address: int, nbytes: int) -> None:
        try:
            memory = self._agent.get_reg_descs([(address, nbytes, 0, "")], "DRAM")
            self._agent.register_memory(memory)
        except Exception as error:
            raise LaneUnavailable(f"{nbytes} bytes cannot be registered with NIXL: {error}") from error

    def notifications(self) -> Sequence[bytes]:
        found: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [note for notes in found.values() for note in notes]

    def close(self) -> None:
        self._agent = None


def _package() -> Any:
    for name in _PACKAGES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise LaneUnavailable("the package nixl is not installed (pip install --no-deps nixl-cu13)")
