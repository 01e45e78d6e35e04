"""A tiny fp32 target with drafters, documents and records that come out the same in every process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from drafters.dflash import DFlashDrafter
from drafters.dflash_config import drafter_config
from drafters.identity import TargetIdentity
from drafters.initialise import initialise
from drafters.length_head import LengthHead
from drafters.packing import Document
from drafters.target import Target
from serving_bridge.records import Round, Sampling, VerificationRecord
from serving_bridge.spool import SpoolWriter

VOCAB = 32
BLOCK_SIZE = 4
PROMPT_LENGTH = 3
TARGET_ID = "tiny@r0#0123456789ab"


def make_target() -> Target:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
    return Target(model, TargetIdentity("tiny", "r0", "0123456789abcdef"), [0, 2])


def make_drafter(target: Target, *, block_size: int = BLOCK_SIZE, seed: int = 0) -> DFlashDrafter:
    config = drafter_config(
        target.config,
        num_layers=1,
        block_size=block_size,
        mask_token_id=VOCAB - 1,
        target_layer_ids=target.layer_ids,
    )
    with torch.random.fork_rng(devices=[]):
        drafter = DFlashDrafter(config)
    initialise(drafter, target, "random", seed=seed)
    return drafter.float().train()


def make_head(target: Target, *, seed: int = 0, **settings: Any) -> LengthHead:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LengthHead(target.config.hidden_size, width=8, **settings)


def random_ids(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB - 1, (length,), generator=generator).tolist()


def make_document(number: int, response_tokens: int = 12, **fields: Any) -> Document:
    """A random prompt, then a response in which every other token or so is the same: soon learned in part."""
    tokens = [token if token < 16 else 16 for token in random_ids(number, PROMPT_LENGTH + response_tokens)]
    mask = [False] * PROMPT_LENGTH + [True] * response_tokens
    return Document(tokens, mask, f"d{number}", conversation_key=f"c{number}", **fields)


def make_documents(count: int, first: int = 0) -> list[Document]:
    """Documents of 8 to 14 response tokens."""
    return [make_document(number, 8 + number % 7) for number in range(first, first + count)]


def greedy_documents(target: Target, count: int, response_tokens: int = 16) -> list[Document]:
    """Documents whose responses are the target's greedy text."""
    documents = []
    for number in range(count):
        prompt = torch.tensor([random_ids(1000 + number, PROMPT_LENGTH)])
        output = target.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=response_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens = output[0].tolist()
        mask = [False] * PROMPT_LENGTH + [True] * (len(tokens) - PROMPT_LENGTH)
        documents.append(Document(tokens, mask, f"g{number}", conversation_key=f"g{number}"))
    return documents


def make_record(number: int, **changes: Any) -> VerificationRecord:
    """A record whose rounds committed one, two, one, two … tokens."""
    document = make_document(number, 8 + number % 5)
    prompt, output = document.token_ids[:PROMPT_LENGTH], document.token_ids[PROMPT_LENGTH:]
    rounds, start = [], PROMPT_LENGTH
    while start < len(document.token_ids) - 1:
        accepted = len(rounds) % 2
        rounds.append(
            Round(
                start=start,
                drafter_version="v1",
                verify_len=BLOCK_SIZE,
                accepted=accepted,
                draft_ids=[0] * (BLOCK_SIZE - 1),
            )
        )
        start += accepted + 1
    fields: dict[str, Any] = {
        "request_id": f"r{number}",
        "conversation_key": f"conversation-{number}",
        "time": 1000.0 + number,
        "target_id": TARGET_ID,
        "sampling": Sampling(temperature=0.0, top_p=1.0, top_k=0),
        "prompt_ids": prompt,
        "output_ids": output,
        "rounds": rounds,
        "finish_reason": "stop",
        "block_size": BLOCK_SIZE,
    }
    return VerificationRecord(**(fields | changes))


def write_spool(directory: Path, records: Iterable[VerificationRecord], max_bytes: int = 4000) -> None:
    """Seal records into segments of a few records each."""
    writer = SpoolWriter(directory, max_bytes=max_bytes, fsync=False)
    for record in records:
        writer.write(record)
    writer.close()
