"""The model card of a registered drafter: one Markdown page from its tags and lineage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipeline.lineage import Lineage, show_time

DESCRIPTION_LENGTH = 4500
"""MLflow keeps a version's description in a column of 5,000 characters."""


def render_card(
    model_name: str, version: int, tags: Mapping[str, str], aliases: Sequence[str], lineage: Lineage | None
) -> str:
    """What the version is, what made it, how good it is, and what was decided about it."""
    created = tags.get("registered_at")
    lines = [
        f"# {model_name}, version {version}",
        "",
        f"Drafter `{tags.get('drafter_version', 'unknown')}` of family {tags.get('family', 'unknown')} for "
        f"speculative decoding with `{tags.get('target_id', 'unknown')}`. It drafts; what is served stays the target's "
        "distribution.",
        "",
        *_table(
            ("", ""),
            [
                ("aliases", ", ".join(aliases) or "none"),
                ("acceptance length τ at the gate", tags.get("tau", "not measured")),
                ("decision", decision(tags)),
                ("block size", tags.get("block_size", "unknown")),
                ("registered", show_time(float(created)) if created else "unknown"),
                ("parent version", tags.get("parent_version", "none")),
                ("data", tags.get("data_window", "unknown")),
                ("stage", tags.get("stage", "unknown")),
                ("configuration (sha256)", tags.get("config_hash", "unknown")),
                ("code commit", tags.get("git_commit", "unknown")),
                ("tokenizer (sha256)", tags.get("tokenizer_hash", "unknown")),
                ("files (sha256)", tags.get("directory_sha256", "unknown")),
            ],
        ),
    ]
    if lineage is not None and lineage.baseline:
        rows = [
            (domain, f"{sums.committed / sums.rounds:.3f}", str(sums.documents), str(sums.rounds))
            for domain, sums in lineage.baseline.items()
        ]
        lines += ["", "## Acceptance at the gate", "", *_table(("domain", "τ", "documents", "rounds"), rows)]
    if lineage is not None and lineage.data is not None and lineage.data.domains:
        counts = lineage.data.domains
        total = sum(counts.values())
        shares = [(domain, str(n), f"{n / total:.1%}") for domain, n in counts.items()]
        lines += ["", "## Data by domain", "", *_table(("domain", "documents", "share"), shares)]
    lines += [
        "",
        "## Limits",
        "",
        "τ is replayed on held-out text of the time, with whole blocks; on other text, and under a length policy, it "
        "differs. The drafter works with the target and tokenizer above only.",
    ]
    return "\n".join(lines) + "\n"


def decision(tags: Mapping[str, str]) -> str:
    """What became of a version, in words."""
    if "rolled_back_reason" in tags:
        return f"rolled back: {tags['rolled_back_reason']}"
    outcome = tags.get("gate_outcome")
    return "not judged" if outcome is None else f"{outcome}: {tags.get('gate_reason', 'no reason kept')}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

    return [line(header), "|" + "---|" * len(header), *(line(row) for row in rows)]
