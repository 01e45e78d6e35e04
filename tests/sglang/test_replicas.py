"""Several servers, one drafter: all of them get it or none does."""

from __future__ import annotations

import pytest

from drafters.errors import UserError
from pipeline.stages.servers import swap_all
from tests.sglang.live_server import Site


def test_all_replicas_serve_the_new_drafter_or_the_old_one(dflash: Site, adaflash: Site) -> None:
    servers = [dflash.server(), adaflash.server()]
    swap_all(servers, dflash.scene.second)
    assert [server.drafter_version for server in servers] == ["v2", "v2"]
    assert dflash.client.checksum("draft") == adaflash.client.checksum("draft")
    for site in (dflash, adaflash):
        assert len(site.generate(site.scene.prompts[0], 8)["output_ids"]) == 8

    assert adaflash.process is not None
    adaflash.process.stop(9)
    with pytest.raises(UserError, match=rf"{adaflash.client.url}.*{dflash.client.url} is back on v2"):
        swap_all(servers, dflash.scene.first)
    assert servers[0].drafter_version == "v2"
    assert len(dflash.generate(dflash.scene.prompts[0], 8)["output_ids"]) == 8
