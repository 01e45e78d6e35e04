"""Divergence of draft and target distributions over answers, for the heat map and by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from drafters.divergence import TokenDivergence, token_divergence
from drafters.packing import Document
from pipeline.benchmark.answers import Answer
from pipeline.benchmark.methods import DrafterChoice
from pipeline.models import TargetBundle, load_drafter_for


def chosen_answers(cells: Sequence[Sequence[Answer]], count: int) -> list[Answer]:
    """`count` answers taken in turn from the cells given, one for each benchmark, evenly over each."""
    share = -(-count // max(1, len(cells)))
    picked = []
    for answers in cells:
        usable = [answer for answer in answers if len(answer.output_ids) > 1]
        few = min(share, len(usable))
        picked += [usable[i * len(usable) // few] for i in range(few)]
    return picked[:count]


def divergence_of(
    choice: DrafterChoice, bundle: TargetBundle, answers: Sequence[Answer]
) -> dict[str, Any] | None:
    """Figures for a report: by slot over all answers, and token by token over the one in the middle.

    The heat map shows the answer whose mean divergence is the median one.
    """
    drafter = load_drafter_for(choice.directory, bundle, dtype=bundle.target.dtype).drafter
    walked: list[tuple[Answer, list[TokenDivergence]]] = []
    for answer in answers:
        mask = [False] * len(answer.prompt_ids) + [True] * len(answer.output_ids)
        document = Document([*answer.prompt_ids, *answer.output_ids], mask, answer.document_id, answer.domain)
        if tokens := token_divergence(drafter, bundle.target, document):
            walked.append((answer, tokens))
    if not walked:
        return None
    walked.sort(key=lambda pair: float(np.mean([token.divergence for token in pair[1]])))
    shown, tokens = walked[(len(walked) - 1) // 2]
    return {
        "drafter": choice.label,
        "answers": len(walked),
        "by_slot": _by_slot([token for _, found in walked for token in found], choice.block_size),
        "heat_map": _heat_map(shown, tokens, bundle.tokenizer),
    }


def _by_slot(tokens: Sequence[TokenDivergence], block_size: int) -> list[dict[str, Any]]:
    rows = []
    for slot in range(1, block_size):
        values = [token.divergence for token in tokens if token.slot == slot]
        if values:
            quartiles = {f"p{p}": float(np.percentile(values, p)) for p in (25, 50, 75)}
            rows.append({"slot": slot, "tokens": len(values), "mean": float(np.mean(values)), **quartiles})
    return rows


def _heat_map(answer: Answer, tokens: Sequence[TokenDivergence], tokenizer: Any) -> dict[str, Any]:
    first = len(answer.prompt_ids)
    by_position = {token.position: token for token in tokens}
    cells: list[dict[str, Any]] = []
    for index, token_id in enumerate(answer.output_ids):
        found = by_position.get(first + index)
        values = {"slot": None, "divergence": None, "accepted": None} if found is None else asdict(found)
        values.pop("position", None)
        cells.append({"text": tokenizer.decode([token_id]), **values})
    return {"document_id": answer.document_id, "turn": answer.turn, "tokens": cells}
