"""A configuration of the whole loop that ends within seconds, and its prompts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

TOPICS = {
    "math": "What is {} plus {}?",
    "chat": "Tell friend {} about day {}.",
    "code": "Write function f{} of {} arguments.",
}


def write_prompts(path: Path, domain: str, numbers: range) -> Path:
    """One prompt a line; different numbers give different prompts."""
    rows = [
        {"id": f"{domain}-{n}", "domain": domain, "turns": [TOPICS[domain].format(n, 2 * n)]} for n in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(directory: Path, **changes: Any) -> Path:
    """`<directory>/tiny.yaml` with its prompts beside it; results go to `<directory>/out`."""
    for domain in TOPICS:
        write_prompts(directory / f"{domain}.jsonl", domain, range(10))
        write_prompts(directory / f"heldout-{domain}.jsonl", domain, range(100, 104))
    write_prompts(directory / "traffic.jsonl", "code", range(200, 220))
    training = {"anchors_per_document": 16, "precision": "32-true"}
    config: dict[str, Any] = {
        "name": "tiny",
        "output": str(directory / "out"),
        "seed": 1,
        "threads": 1,
        "target": {"model": "tiny:qwen3", "dtype": "float32"},
        "drafter": {"num_layers": 1, "block_size": 4, "num_context_layers": 2},
        "data": {
            "train": [{"path": str(directory / f"{domain}.jsonl")} for domain in ("math", "chat")],
            "heldout": [{"path": str(directory / f"heldout-{domain}.jsonl")} for domain in TOPICS],
            "val_fraction": 0.3,
            "max_length": 128,
            "row_tokens": 512,
        },
        "regenerate": {"max_new_tokens": 12, "batch_size": 16},
        "train": training
        | {"steps": 12, "validate_every": 6, "checkpoint_every": 6, "optim": {"lr": 3e-3, "warmup_steps": 1}},
        "distill": training | {"steps": 2, "validate_every": 2},
        "length_head": training | {"steps": 2},
        "evaluate": {"max_new_tokens": 10, "lossless_prompts": 4, "speed_prompts": 1, "fixed_lengths": [2]},
        "online": training
        | {
            "trigger": 5,
            "passes": 1,
            "max_rounds": 2,
            "max_length": 128,
            "holdout_fraction": 0.3,
            "poll_s": 0.05,
            "optim": {"lr": 3e-3, "warmup_steps": 1, "schedule": "constant"},
        },
        "gate": {"min_documents": 4, "max_domain_drop": 0.9},
        "canary": {"min_records": 2, "timeout_s": 2},
        "serve": {"max_new_tokens": 10, "max_running": 2, "spool_max_age_s": 0.1},
        "traffic": {"sources": [{"path": str(directory / "traffic.jsonl")}], "domain": "code"},
    }
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump(config | changes))
    return path


def snapshot(directory: Path) -> dict[str, str]:
    """Sha256 of every file of a run but MLflow's own, which log failed runs too, and the trainers' lock."""
    files = [p for p in sorted(directory.rglob("*")) if p.is_file()]
    names = {p.relative_to(directory).as_posix(): p for p in files}
    passing = ("mlflow.db", "artifacts/", "online/trainer.lock")
    kept = {name: p for name, p in names.items() if not name.startswith(passing)}
    return {name: hashlib.sha256(p.read_bytes()).hexdigest() for name, p in kept.items()}
