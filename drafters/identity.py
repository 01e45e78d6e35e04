"""Which target a drafter belongs to.

A drafter only makes sense beside the model whose hidden states, embedding and vocabulary it was trained with, so
every checkpoint, record and registered version carries this identity and every boundary compares it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from drafters.errors import UserError


@dataclass(frozen=True)
class TargetIdentity:
    """Name, revision and tokenizer hash of a target model."""

    name: str
    revision: str
    tokenizer_hash: str

    @property
    def target_id(self) -> str:
        """The short printable form carried by records and registry tags."""
        return f"{self.name}@{self.revision}#{self.tokenizer_hash[:12]}"

    def to_json(self) -> dict[str, str]:
        """Plain dictionary for manifests."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, str]) -> TargetIdentity:
        """Inverse of `to_json`; raises `UserError` on a missing field."""
        try:
            return cls(data["name"], data["revision"], data["tokenizer_hash"])
        except KeyError as missing:
            raise UserError(f"target identity lacks the field {missing}") from missing


def tokenizer_hash(tokenizer: Any) -> str:
    """Sha256 (hex) over what decides token ids: the vocabulary, special tokens and the chat template.

    Two tokenizers with equal hashes map a conversation to equal ids, which is what a drafter relies on.
    """
    content = {
        "vocab": sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])),
        "special": sorted((str(k), str(v)) for k, v in tokenizer.special_tokens_map.items()),
        "chat_template": tokenizer.chat_template,
    }
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()


def require_same_target(expected: TargetIdentity, found: TargetIdentity, what: str) -> None:
    """Refuse a drafter, response store or record that belongs to another target.

    Raises:
        UserError: when the tokenizer or the target differ, naming both.
    """
    if expected.tokenizer_hash != found.tokenizer_hash:
        raise UserError(
            f"{what}: made with another tokenizer ({found.target_id}) than the target's "
            f"({expected.target_id}); token ids would not mean the same"
        )
    if (expected.name, expected.revision) != (found.name, found.revision):
        raise UserError(f"{what}: made for target {found.target_id}, but this run uses {expected.target_id}")
