"""D3D on the real server: a drafter that reads text alone, of the target's family and weights or of neither."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.checkpoint import load_drafter, save_drafter
from serving_bridge.records import VerificationRecord, acceptance_length
from serving_bridge.server import ServerLost, SwapError
from serving_bridge.sglang_process import running_server
from tests.serving_bridge.tiny_serving import BLOCK_SIZE, tiny_drafter
from tests.sglang.d3d_scene import make_d3d_scene, own_logits
from tests.sglang.live_server import CONTEXT, Site, wait_for_records

NEW_TOKENS = 40
CHUNK = 32
"""Prompts longer than this are prefilled in parts."""
EXACT = 1e-3
"""Differences of float32 logits by the order of additions."""


class D3DSite(Site):
    """A server whose target and drafter run in `dtype`."""

    dtype: torch.dtype


@pytest.fixture(scope="module", params=[("qwen3", "bfloat16"), ("llama", "float32")], ids="-".join)
def d3d(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[D3DSite]:
    kind, dtype = request.param
    scene = make_d3d_scene(tmp_path_factory.mktemp("d3d"), kind, CONTEXT)
    place = tmp_path_factory.mktemp("target")
    scene.target.model.to(getattr(torch, dtype)).save_pretrained(place)
    scene.target.model.float()
    site = D3DSite(tmp_path_factory.mktemp("site"), scene, place, "D3D")
    site.dtype = getattr(torch, dtype)
    extra = (*site.launch.extra, "--chunked-prefill-size", str(CHUNK), "--dtype", dtype)
    site.launch = replace(site.launch, extra=extra)
    with running_server(site.launch, site.root / "server.log"):
        yield site


@pytest.fixture(scope="module")
def served(d3d: D3DSite) -> dict[str, dict[str, Any]]:
    """Answers to all prompts, five at a time, by request id."""

    def ask(item: tuple[int, list[int]]) -> tuple[str, dict[str, Any]]:
        number, prompt = item
        return f"r{number}", d3d.generate(prompt, NEW_TOKENS, rid=f"r{number}")

    with ThreadPoolExecutor(5) as pool:
        return dict(pool.map(ask, enumerate(d3d.scene.prompts)))


@pytest.fixture(scope="module")
def records(d3d: D3DSite, served: dict[str, Any]) -> dict[str, VerificationRecord]:
    return wait_for_records(d3d, set(served), "d3d")


def assert_chosen(tokens: list[int], exact: torch.Tensor, rounded: torch.Tensor) -> int:
    """That each token is the best of its row of the `exact` logits, or may be by what rounding does; how many are not."""
    gaps = exact.max(-1).values - exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    allowed = max(EXACT, 2 * float((exact - rounded).abs().max()))
    assert (gaps <= allowed).all(), f"{tokens}: {gaps.tolist()}, rounding explains {allowed}"
    return int((gaps > 0).sum())


def assert_targets_own(site: D3DSite, prompt: list[int], output: list[int]) -> None:
    """The target's own greedy text."""
    ids, logits = torch.tensor([[*prompt, *output[:-1]]]), []
    for dtype in (torch.float32, site.dtype):
        model = copy.deepcopy(site.scene.target.model).to(dtype)
        with torch.no_grad():
            logits.append(model(ids).logits[0, len(prompt) - 1 :].float())
    others = assert_chosen(output, *logits)
    assert others <= len(output) // 10


def assert_our_own_drafts(
    site: D3DSite, records: Iterable[VerificationRecord], directory: Path | None = None
) -> None:
    """What the server drafted at each round is what `D3DDrafter.draft` makes of the same text."""
    drafters = [
        load_drafter(directory or site.scene.first, dtype=d).drafter for d in (torch.float32, site.dtype)
    ]
    others = total = 0
    for record in records:
        text = [*record.prompt_ids, *record.output_ids]
        for r in record.rounds:
            logits = [own_logits(drafter, text[: r.start + 1]) for drafter in drafters]
            others += assert_chosen(r.draft_ids, *logits)
            total += len(r.draft_ids)
    assert total > 0 and others <= total // 20, f"{others} of {total}"


def test_served_text_is_the_targets_own_greedy_text(d3d: D3DSite, served: dict[str, dict[str, Any]]) -> None:
    for number, prompt in enumerate(d3d.scene.prompts):
        assert_targets_own(d3d, prompt, served[f"r{number}"]["output_ids"])


def test_records_hold_every_draft_and_where_its_round_began(
    d3d: D3DSite, records: dict[str, VerificationRecord]
) -> None:
    for record in records.values():
        text = [*record.prompt_ids, *record.output_ids]
        assert (record.length_policy, record.target_id) == ("d3d", d3d.scene.target.identity.target_id)
        at = len(record.prompt_ids)
        for r in record.rounds:
            assert (r.start, r.drafter_version, r.verify_len) == (at, "v1", record.block_size)
            assert len(r.draft_ids) == record.block_size - 1
            committed = text[r.start + 1 : r.start + 1 + r.accepted]
            assert r.draft_ids[: len(committed)] == committed
            at += r.accepted + 1


def test_drafted_tokens_are_our_own(d3d: D3DSite, records: dict[str, VerificationRecord]) -> None:
    assert_our_own_drafts(d3d, records.values())


def test_what_was_memorised_is_accepted(d3d: D3DSite) -> None:
    for number in range(4):
        d3d.generate(d3d.scene.prompts[number], len(d3d.scene.outputs[number]), rid=f"known{number}")
    found = wait_for_records(d3d, {f"known{n}" for n in range(4)}, "known")
    lengths = [acceptance_length(record) for record in found.values()]
    assert all(length is not None and length > 1.3 for length in lengths), lengths


def test_a_cached_prefix_that_was_decoded_drafts_as_well(
    d3d: D3DSite, served: dict[str, dict[str, Any]]
) -> None:
    """Its keys and values come from prefill and from verified blocks; the drafter's must be there as well."""
    prompt = [*d3d.scene.prompts[1], *served["r1"]["output_ids"][:24]]
    again = d3d.generate(prompt, NEW_TOKENS, rid="cached")
    assert again["meta_info"]["cached_tokens"] > len(d3d.scene.prompts[1])
    assert_targets_own(d3d, prompt, again["output_ids"])
    assert_our_own_drafts(d3d, wait_for_records(d3d, {"cached"}, "cached").values())


def test_a_prompt_read_in_parts_drafts_as_well(d3d: D3DSite) -> None:
    prompt = [token for p, o in zip(d3d.scene.prompts, d3d.scene.outputs, strict=True) for token in (*p, *o)]
    assert len(prompt) > 3 * CHUNK
    output = d3d.generate(prompt, NEW_TOKENS, rid="long")["output_ids"]
    assert_targets_own(d3d, prompt, output)
    assert_our_own_drafts(d3d, wait_for_records(d3d, {"long"}, "long").values())


def test_a_swap_changes_embedding_layers_and_head_of_the_drafter_alone(d3d: D3DSite) -> None:
    server, prompt = d3d.server(), d3d.scene.prompts[2]
    before = (d3d.client.checksum("draft"), d3d.client.checksum("target"))
    undisturbed = d3d.generate(prompt, 300, rid="calm")["output_ids"]
    answer: list[Any] = []
    asking = threading.Thread(target=lambda: answer.append(d3d.generate(prompt, 300, rid="across")))
    asking.start()
    time.sleep(0.6)
    report = server.swap(d3d.scene.second)
    asking.join()
    assert (report.old_version, report.new_version, report.route) == ("v1", "v2", "directory")
    assert report.old_draft_checksum == before[0] != report.draft_checksum
    assert report.target_checksum == before[1] == d3d.client.checksum("target")
    # the two drafters' rounds begin at different tokens: in bfloat16 a near tie may then round otherwise, and the text goes on
    # from there
    assert_targets_own(d3d, prompt, answer[0]["output_ids"])
    if d3d.dtype == torch.float32:
        assert answer[0]["output_ids"] == undisturbed

    fresh = d3d.generate(prompt, NEW_TOKENS, rid="fresh")
    found = wait_for_records(d3d, {"across", "fresh"}, "swap")
    # first of all: other tests share the server
    assert server.roll_back() == "v1"
    assert d3d.client.checksum("draft") == before[0]

    assert fresh["meta_info"]["cached_tokens"] == 0, (
        "the first drafter's part of the cache is not the second's"
    )
    assert {r.drafter_version for r in found["across"].rounds} == {"v1", "v2"}
    assert {r.drafter_version for r in found["fresh"].rounds} == {"v2"}
    assert_our_own_drafts(d3d, [found["fresh"]], d3d.scene.second)


def test_a_drafter_of_the_other_family_is_refused(d3d: D3DSite, tmp_path: Path) -> None:
    target, before = d3d.scene.target, d3d.client.checksum("draft")
    dflash = save_drafter(
        tmp_path / "dflash", tiny_drafter(target, seed=1), identity=target.identity, drafter_version="dflash"
    )
    with pytest.raises(SwapError, match="restart the server for another shape"):
        d3d.server().swap(dflash)
    assert (d3d.server().drafter_version, d3d.client.checksum("draft")) == ("v1", before)
    assert len(d3d.generate(d3d.scene.prompts[0], 4)["output_ids"]) == 4


def test_nothing_is_missing(d3d: D3DSite, records: dict[str, VerificationRecord]) -> None:
    status = d3d.client.plugin_status()
    assert status is not None and status["missing_hooks"] == []
    assert (status["verify"], status["block_size"]) == ("static", BLOCK_SIZE)
    assert status["records"]["dropped"] == 0
    assert status["records"]["written"] >= len(records)


def test_dflash_says_what_serves_a_d3d_drafter(tmp_path: Path) -> None:
    scene = make_d3d_scene(tmp_path / "scene", "llama", CONTEXT)
    scene.target.model.save_pretrained(tmp_path / "target")
    site, log = Site(tmp_path, scene, tmp_path / "target", "DFLASH"), tmp_path / "server.log"
    with pytest.raises(ServerLost), running_server(site.launch, log):
        pass
    assert "a D3D drafter; start with --speculative-algorithm D3D" in log.read_text()
