"""A weighted mixture of conversation sources, and the held-out split.

Both are functions of their inputs and a seed or salt only: the same files give the same order and the same
split on every machine.
"""

from __future__ import annotations

import hashlib
import random
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from datamodules.prompts import Conversation, SourceSpec, load_source
from drafters.errors import UserError


@dataclass(frozen=True)
class WeightedSource:
    """Conversations of one source and its share of the mixture (any positive number)."""

    name: str
    weight: float
    conversations: Sequence[Conversation]


@dataclass(frozen=True)
class MixedConversations:
    """The mixture in order; how many each source gave, and how many duplicates each lost."""

    conversations: list[Conversation]
    taken: dict[str, int] = field(default_factory=dict)
    duplicates: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Mixture:
    """Sources interleaved without replacement in proportion to their weights.

    Each source is shuffled with the seed, then a smooth weighted round robin picks the source of each next item:
    every source gains its share of an item as credit, the richest one is taken and pays one. No source is ever a full
    item ahead of its share, so every prefix has the proportions asked for. A source that runs out leaves its
    share to the others. The mixture ends at `limit` or when all sources are used up.

    Of prompts that are equal after normalisation (see `prompt_fingerprint`) only the first stays, sources in the
    order given; this happens before the interleaving so that it does not skew the proportions.
    """

    sources: Sequence[WeightedSource]
    seed: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("a mixture needs at least one source")
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise UserError(f"mixture sources need distinct names, found {names}")
        for source in self.sources:
            if not 0 < source.weight < float("inf"):
                raise UserError(f"source {source.name!r}: weight must be positive and finite")

    def build(self) -> MixedConversations:
        """The mixed list; equal inputs give equal results."""
        queues, duplicates = self._shuffled_without_duplicates()
        credit = [0.0] * len(queues)
        taken = [0] * len(queues)
        mixed: list[Conversation] = []
        while self.limit is None or len(mixed) < self.limit:
            active = [i for i, queue in enumerate(queues) if taken[i] < len(queue)]
            if not active:
                break
            total = sum(self.sources[i].weight for i in active)
            for i in active:
                credit[i] += self.sources[i].weight / total
            chosen = max(active, key=lambda i: credit[i])
            credit[chosen] -= 1.0
            mixed.append(queues[chosen][taken[chosen]])
            taken[chosen] += 1
        names = [source.name for source in self.sources]
        return MixedConversations(
            mixed,
            dict(zip(names, taken, strict=True)),
            dict(zip(names, duplicates, strict=True)),
        )

    def _shuffled_without_duplicates(self) -> tuple[list[list[Conversation]], list[int]]:
        queues: list[list[Conversation]] = []
        duplicates: list[int] = []
        fingerprints: set[str] = set()
        ids: set[str] = set()
        for source in self.sources:
            kept: list[Conversation] = []
            for conversation in source.conversations:
                fingerprint = prompt_fingerprint(conversation)
                if fingerprint in fingerprints:
                    continue
                fingerprints.add(fingerprint)
                # Files often number their rows from zero; ids must stay unique in the mixture.
                if conversation.id in ids:
                    conversation = replace(conversation, id=f"{source.name}/{conversation.id}")
                if conversation.id in ids:
                    raise UserError(
                        f"source {source.name!r}: two different conversations share the id "
                        f"{conversation.id!r}"
                    )
                ids.add(conversation.id)
                kept.append(conversation)
            random.Random(f"{self.seed}:{source.name}").shuffle(kept)
            queues.append(kept)
            duplicates.append(len(source.conversations) - len(kept))
        return queues, duplicates


def load_mixture(
    specs: Iterable[SourceSpec], *, seed: int = 0, limit: int | None = None
) -> MixedConversations:
    """Load every source and mix them.

    Raises:
        UserError: from `load_source`, or for no sources, equal names or bad weights.
    """
    sources = [WeightedSource(spec.label, spec.weight, load_source(spec)) for spec in specs]
    return Mixture(sources, seed=seed, limit=limit).build()


def prompt_fingerprint(conversation: Conversation) -> str:
    """Sha256 (hex) of the prompt: all messages but the assistant's, normalised.

    Unicode form (NFKC), letter case and runs of white space do not matter.
    """
    digest = hashlib.sha256()
    for message in conversation.messages:
        if message["role"] != "assistant":
            text = " ".join(unicodedata.normalize("NFKC", message["content"]).casefold().split())
            digest.update(f"{message['role']}\x1f{text}\x1e".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def split_by_hash(
    conversations: Iterable[Conversation], fraction: float, salt: str
) -> tuple[list[Conversation], list[Conversation]]:
    """Split into (training, held-out) by the hash of the prompt.

    The side of a conversation depends on its prompt and the salt only: not on its id, its order, or what else is in
    the list. A larger fraction only moves conversations to the held-out side, never back.

    Args:
        conversations: any order; kept on both sides.
        fraction: expected share of the held-out side, 0..1.
        salt: names the split; another salt gives an independent one.
    """
    if not 0.0 <= fraction <= 1.0:
        raise UserError(f"held-out fraction must lie in 0..1, found {fraction}")
    training: list[Conversation] = []
    held_out: list[Conversation] = []
    for conversation in conversations:
        digest = hashlib.sha256(f"{salt}\x1f{prompt_fingerprint(conversation)}".encode()).digest()
        side = held_out if int.from_bytes(digest[:8]) < fraction * 2**64 else training
        side.append(conversation)
    return training, held_out
