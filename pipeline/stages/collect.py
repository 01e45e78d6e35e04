"""`draftsmith data collect`: records from a server without the plugin."""

from __future__ import annotations

import contextlib

from pipeline.config import Config
from pipeline.console import say
from pipeline.fleet import log_place
from pipeline.models import read_identity
from serving_bridge.collector import Collector, collecting_proxy
from serving_bridge.sglang_plugin.settings import PluginSettings
from serving_bridge.transports import LogPlace, open_writer


def collect_records(config: Config, upstream: str, port: int, log: LogPlace | None) -> dict[str, int]:
    """Run the proxy until it is interrupted; returns what became of the calls."""
    settings = config.sglang
    place = log or log_place(config)
    writer = open_writer(place, capacity=settings.buffer_records, spool_max_age_s=5.0)
    collector = Collector(
        writer,
        target_id=read_identity(config).target_id,
        block_size=config.drafter.block_size,
        settings=PluginSettings(log_share=settings.log_share, log_by_default=settings.log_by_default),
    )
    try:
        with collecting_proxy(collector, upstream, port) as server:
            say(f"clients may talk to http://127.0.0.1:{server.server_port}; records go to {place}")
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
    finally:
        writer.close()
    return dict(collector.counts)
