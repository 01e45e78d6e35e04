"""What one batch of a training stage holds: tokens, blocks, and what the loss looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drafters.errors import UserError
from pipeline.config import Config, FitConfig, OnlineConfig

Stage = Literal["train", "distill", "online"]
STAGES: tuple[Stage, ...] = ("train", "distill", "online")


@dataclass(frozen=True)
class Step:
    """One batch: `documents` alike, laid end to end; an optimizer step has `accumulate` of them.

    Attributes:
        family: `dflash` or `d3d`.
        documents: D, in the row.
        document_tokens: S, of each.
        response_tokens: of each, at its end.
        anchors: A, blocks of each.
        block_size: B.
        accumulate: batches per optimizer step.
        objective: `ce`, `opd` or `osd`.
        teacher: the loss asks for the target's predictions.
        next_token: D3D's L_AR is part of the loss.
        loss_vocabulary: V, tokens that the loss sees.
        freeze_mlp: MLPs of the drafter get no gradient.
        cache_bytes: memory given to the feature cache.
        length_head_width: of the length head that learns beside the drafter; None: there is none.
        target_bytes: of an element of the target.
        mixed: bfloat16 products with fp32 weights (autocast); False: all in fp32.
    """

    family: Literal["dflash", "d3d"]
    documents: int
    document_tokens: int
    response_tokens: int
    anchors: int
    block_size: int
    accumulate: int
    objective: Literal["ce", "opd", "osd"]
    teacher: bool
    next_token: bool
    loss_vocabulary: int
    freeze_mlp: bool = False
    cache_bytes: int = 0
    length_head_width: int | None = None
    target_bytes: int = 2
    mixed: bool = True

    @property
    def tokens(self) -> int:
        """T = D·S."""
        return self.documents * self.document_tokens

    @property
    def blocks(self) -> int:
        """N = D·A."""
        return self.documents * self.anchors

    @property
    def slots(self) -> int:
        """R = N·B, rows of the drafter."""
        return self.blocks * self.block_size

    @property
    def counted_slots(self) -> int:
        """N·(B-1), the most that the loss counts: blocks at the end of a response have fewer."""
        return self.blocks * (self.block_size - 1)

    @property
    def teacher_positions(self) -> int:
        """Distinct positions whose prediction the loss asks of the target."""
        return min(self.counted_slots, self.documents * (self.response_tokens - 1))

    @property
    def next_tokens(self) -> int:
        """Rows of L_AR; 0 without it."""
        return self.documents * self.response_tokens if self.next_token else 0

    @property
    def _groups(self) -> list[tuple[int, int]]:
        """Of each group of a document's blocks that attend together: its blocks, and the keys that they see or mask.

        Anchors are taken as evenly spread over the response, the last one at its latest.
        """
        from drafters.blocks import GROUP_ROWS

        count = -(-self.anchors * self.block_size // GROUP_ROWS)
        prompt = self.document_tokens - self.response_tokens
        groups = []
        for number in range(count):
            blocks = self.anchors * (number + 1) // count - self.anchors * number // count
            if blocks:
                last = prompt + self.response_tokens * (number + 1) // count - 2
                groups.append((blocks, max(1, last) + blocks * self.block_size))
        return groups

    @property
    def block_keys(self) -> int:
        """Keys of all groups of blocks: Σ (last anchor + A·B)."""
        return self.documents * sum(keys for _, keys in self._groups)

    @property
    def block_pairs(self) -> int:
        """Query-key pairs of block attention, masked ones included, as they are computed too."""
        return self.documents * sum(blocks * self.block_size * keys for blocks, keys in self._groups)

    @property
    def runs_target(self) -> bool:
        """Whether the step needs the target: always for features, else for its predictions."""
        return self.family == "dflash" or self.teacher

    @property
    def product_bytes(self) -> int:
        """Of an element that enters the drafter's products."""
        return 2 if self.mixed else 4


def step_of(
    config: Config,
    stage: Stage,
    *,
    vocabulary: int,
    target_bytes: int,
    mixed: bool,
    document_tokens: int | None = None,
) -> Step:
    """The batch of a stage if all documents are alike.

    Args:
        config: the run.
        stage: `train`, `distill` or `online`.
        vocabulary: rows of the target's head.
        target_bytes, mixed: number formats, see `Step`.
        document_tokens: of each document; None: the longest that the configuration lets in. The response is as long as
            `regenerate.max_new_tokens` allows, the prompt the rest.

    Raises:
        UserError: when the documents cannot be that long, or hold no anchor.
    """
    settings: FitConfig | OnlineConfig = getattr(config, stage)
    max_length = settings.max_length if isinstance(settings, OnlineConfig) else config.data.max_length
    longest = min(max_length, config.data.max_prompt_tokens + config.regenerate.max_new_tokens)
    tokens = document_tokens or longest
    if not 3 <= tokens <= max_length:
        raise UserError(
            f"--document-tokens: {tokens} is outside 3..{max_length} "
            f"({'online' if stage == 'online' else 'data'}.max_length)"
        )
    response = min(config.regenerate.max_new_tokens, tokens - 1)
    # online rounds take one document a batch
    documents = 1 if stage == "online" else max(1, config.data.row_tokens // tokens)
    vocabulary_seen = min(settings.vocabulary or vocabulary, vocabulary)
    teacher = stage != "train" or config.regenerate.temperature > 0 or settings.loss.objective != "ce"
    family = config.drafter.family
    if family == "d3d" and settings.vocabulary is not None:
        raise UserError(f"{stage}.vocabulary: a d3d drafter trains its whole head; set it to null")
    return Step(
        family=family,
        documents=documents,
        document_tokens=tokens,
        response_tokens=response,
        anchors=min(settings.anchors_per_document, response - 1),
        block_size=config.drafter.block_size,
        accumulate=settings.accumulate,
        objective=settings.loss.objective,
        teacher=teacher,
        next_token=family == "d3d" and settings.loss.ar_weight > 0,
        loss_vocabulary=vocabulary_seen,
        freeze_mlp=config.drafter.freeze_mlp,
        cache_bytes=settings.feature_cache_mib * 2**20,
        length_head_width=config.length_head.width if stage == "online" else None,
        target_bytes=target_bytes,
        mixed=mixed,
    )
