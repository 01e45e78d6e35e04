"""ADAFLASH on the real server: the same text from fewer verified rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.sglang.live_server import Site, is_tie, target_logits, wait_for_records

NEW_TOKENS = 40


def test_fewer_rows_and_the_targets_own_text(adaflash: Site) -> None:
    def ask(number: int) -> list[int]:
        prompt = adaflash.scene.prompts[number]
        output: list[int] = adaflash.generate(prompt, NEW_TOKENS, rid=f"a{number}")["output_ids"]
        return output

    with ThreadPoolExecutor(5) as pool:
        outputs = list(pool.map(ask, range(5)))
    for prompt, output in zip(adaflash.scene.prompts, outputs, strict=True):
        logits = target_logits(adaflash, [*prompt, *output])
        for index, token in enumerate(output):
            row = logits[len(prompt) + index - 1]
            assert int(row.argmax()) == token or is_tie(row)

    status = adaflash.client.plugin_status()
    assert status is not None and status["verify"] == "compact"
    assert status["verified_rows"] < status["drafted_rows"]

    records = wait_for_records(adaflash, {f"a{n}" for n in range(5)}, "adaflash")
    lengths = {r.verify_len for record in records.values() for r in record.rounds}
    assert len(lengths) > 1, "the length head should ask for different lengths"
    for record in records.values():
        assert record.length_policy == "adaflash"
        text = [*record.prompt_ids, *record.output_ids]
        for r in record.rounds:
            assert r.accepted < r.verify_len
            # all drafts are logged, also those that were not verified
            assert len(r.draft_ids) == record.block_size - 1
            committed = text[r.start + 1 : r.start + 1 + r.accepted]
            assert r.draft_ids[: len(committed)] == committed
