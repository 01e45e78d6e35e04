"""Where a registered drafter comes from: parent, data, configuration, code, and what the gate measured of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from drafters.errors import UserError

if TYPE_CHECKING:
    from drafters.packing import Document


class DomainReplay(Protocol):
    """What a baseline reads of a replayed document; `drafters.replay.ReplayResult` fits."""

    @property
    def domain(self) -> str: ...
    @property
    def committed(self) -> int: ...
    @property
    def rounds(self) -> int: ...


@dataclass(frozen=True)
class DataWindow:
    """What a drafter was made of: a label, documents by domain, and for traffic the time of its records (unix s).

    Records held out for the gate are among those of traffic: the domains are also what later traffic is compared with.
    """

    label: str
    domains: dict[str, int]
    since: float | None = None
    until: float | None = None

    @classmethod
    def of(cls, label: str, documents: Iterable[Document]) -> DataWindow:
        """Of offline documents, which have no time."""
        return cls(label, dict(sorted(Counter(d.domain for d in documents).items())))

    def text(self) -> str:
        """One line for tables and tags."""
        what = f"{self.label}: {sum(self.domains.values())} documents"
        if self.since is None or self.until is None:
            return what
        return f"{what}, {show_time(self.since)} to {show_time(self.until)}"


@dataclass(frozen=True)
class DomainSums:
    """Replayed documents of a domain: τ is committed ÷ rounds."""

    documents: int
    committed: int
    rounds: int


@dataclass(frozen=True)
class Lineage:
    """Attributes:
    stage: command that registered the version.
    parent: champion at the time.
    config_hash: of the configuration, which the run keeps as `config.yaml`.
    git_commit: of the checkout; None for an installed package.
    data: what it was trained on.
    baseline: replay on the gate's traffic by domain; what drift is measured against.
    """

    stage: str | None = None
    parent: int | None = None
    config_hash: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    data: DataWindow | None = None
    baseline: dict[str, DomainSums] = field(default_factory=dict)

    def tags(self) -> dict[str, str]:
        """What tables show of it, as registry tags."""
        commit = self.git_commit
        if commit is not None and self.git_dirty:
            commit += "-dirty"
        values = {
            "stage": self.stage,
            "parent_version": self.parent,
            "config_hash": self.config_hash,
            "git_commit": commit,
            "data_window": None if self.data is None else self.data.text(),
        }
        return {key: str(value) for key, value in values.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Lineage:
        """From `to_json`, of this release or a later one: fields that are unknown here are left out.

        Raises:
            UserError: for anything else.
        """
        try:
            data, baseline = value["data"], value["baseline"]
            return cls(
                **{k: v for k, v in _known(cls, value).items() if k not in ("data", "baseline")},
                data=None if data is None else DataWindow(**_known(DataWindow, data)),
                baseline={d: DomainSums(**_known(DomainSums, sums)) for d, sums in baseline.items()},
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise UserError(f"lineage.json: not written by this release ({error})") from None


def _known(kind: type, value: Mapping[str, Any]) -> dict[str, Any]:
    names = {known.name for known in fields(kind)}
    return {key: item for key, item in value.items() if key in names}


def sums_by_domain(results: Sequence[DomainReplay]) -> dict[str, DomainSums]:
    """A baseline from replayed documents; those without a round count for nothing."""
    counted = [result for result in results if result.rounds]
    sums = {}
    for domain in sorted({result.domain for result in counted}):
        members = [result for result in counted if result.domain == domain]
        sums[domain] = DomainSums(
            len(members), sum(r.committed for r in members), sum(r.rounds for r in members)
        )
    return sums


def show_time(seconds: float) -> str:
    """Unix seconds for people."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
