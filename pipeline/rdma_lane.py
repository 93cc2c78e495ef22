"""The RDMA lane as the settings want it: opened at start, or not, with one line in the log that says why."""

import logging

from engines.rdma import LaneUnavailable, RdmaLane, RdmaSettings
from engines.rdma_nixl import NixlExporter
from pipeline.config import Transport

_log = logging.getLogger("mediagate.frontend")


def rdma_settings(config: Transport) -> RdmaSettings | None:
    """None: no lane is asked for."""
    if config.rdma_listen_ip is None:
        return None
    return RdmaSettings(
        listen_ip=config.rdma_listen_ip,
        listen_port=config.rdma_listen_port,
        pool_slots=config.rdma_pool_slots,
        slot_bytes=config.rdma_slot_bytes,
        landing_wait_s=config.rdma_landing_wait_s,
        read_timeout_s=config.rdma_read_timeout_s,
        slot_ttl_s=config.rdma_slot_ttl_s,
    )


def open_lane(config: Transport) -> RdmaLane | None:
    """Blocks for about a second, before anybody is served.  A lane that cannot be opened is no reason not to start:
    everything goes inline then.
    """
    settings = rdma_settings(config)
    if settings is None:
        if config.mode == "rdma":
            _log.warning("no RDMA lane: --rdma-listen-ip is not set; tensors go inline")
        return None
    try:
        lane = RdmaLane(settings, NixlExporter(settings.listen_port))
    except (LaneUnavailable, OSError) as error:
        _log.warning("no RDMA lane: %s; tensors go inline", error)
        return None
    _log.info(
        "RDMA lane open listen=%s:%d slots=%d slot_bytes=%d ttl_s=%g",
        settings.listen_ip,
        settings.listen_port,
        settings.slots,
        settings.slot_bytes,
        settings.ttl_s,
    )
    return lane
