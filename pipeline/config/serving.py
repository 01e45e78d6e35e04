"""Where drafters serve: the embedded engine, SGLang, the canary; and where they are registered."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.config.section import Section


class TrackingConfig(Section):
    """MLflow."""

    uri: str | None = Field(
        None, description="Tracking URI; null keeps a SQLite file in the output directory."
    )
    experiment: str = Field("draftsmith", description="MLflow experiment that runs are logged to.")
    model_name: str | None = Field(
        None, description="Registered model; null derives it from target and family."
    )


class CanaryConfig(Section):
    """Watching a new champion on live traffic."""

    min_records: int = Field(12, ge=2, description="Records of the new version before the first verdict.")
    max_records: int = Field(96, ge=2, description="Records at which the estimate decides, sure or not.")
    error_rate: float = Field(
        0.01,
        gt=0,
        lt=0.5,
        description="Probability of rolling back a good drafter, and of keeping a bad one.",
    )
    max_drop: float = Field(0.1, ge=0, lt=1, description="Relative drop of live acceptance that rolls back.")
    timeout_s: float = Field(600.0, gt=0, description="Without enough traffic the gate's verdict stands.")


class ServeConfig(Section):
    """How a whole-loop run serves its traffic."""

    engine: Literal["local", "sglang"] = Field(
        "local",
        description="local: the embedded engine; sglang: a real server, started as sglang.launch says.",
    )
    max_new_tokens: int = Field(64, ge=1, description="Longest answer to a traffic prompt.")
    max_running: int = Field(2, ge=1, description="Requests under way at a time.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature of the traffic; 0 is greedy.")
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of serving while the trainer works, which gets the rest; null: no division.",
    )
    spool_max_bytes: int = Field(8 * 2**20, ge=1024, description="Size at which a spool segment is sealed.")
    spool_max_age_s: float = Field(
        5.0, gt=0, description="Age at which a spool segment is sealed, so that readers see its records."
    )


class LaunchConfig(Section):
    """How `deploy --launch` starts SGLang."""

    python: str = Field("python", description="Interpreter of the environment that SGLang is installed in.")
    model: str | None = Field(None, description="Directory or hub name of the target; null: target.model.")
    preset: Literal["cuda", "cpu"] = Field("cuda", description="cpu: for tests and demos, on one machine.")
    algorithm: Literal["DFLASH", "ADAFLASH", "D3D"] = Field(
        "ADAFLASH",
        description="ADAFLASH verifies as much of a block as the length head finds worth it; D3D serves d3d drafters.",
    )
    verify: Literal["auto", "compact", "static"] = Field(
        "auto", description="compact: one packed pass of Σ verify_len rows; static: whole blocks."
    )
    host: str = Field(
        "127.0.0.1", description="Address to listen on; others than loopback need an admin key."
    )
    port: int = Field(30000, ge=1, le=65535, description="Port to listen on.")
    threads: int = Field(1, ge=1, description="CPU threads of the cpu preset.")
    max_total_tokens: int | None = Field(None, ge=64, description="Cache size in tokens; null: SGLang's own.")
    max_running: int | None = Field(None, ge=1, description="Requests decoded together; null: SGLang's own.")
    context_length: int | None = Field(
        None, ge=16, description="Longest request in tokens; null: the model's."
    )
    extra: list[str] = Field(default_factory=list, description="Further arguments, as SGLang spells them.")


class SGLangConfig(Section):
    """Running SGLang servers, and the plugin inside them."""

    urls: list[str] = Field(
        default_factory=list, description="Servers to keep on the champion: http://HOST:PORT."
    )
    log: str | None = Field(
        None, description="Where servers leave records: a directory or redis://…; null: <output>/spool."
    )
    drafter_root: Path | None = Field(
        None, description="Directory that servers load drafters from (swap_root); null: <output>/drafters."
    )
    admin_key_env: str = Field(
        "SGLANG_ADMIN_KEY", description="Environment variable with the servers' admin key, if they have one."
    )
    api_key_env: str = Field("SGLANG_API_KEY", description="Environment variable with the servers' API key.")
    deadline_s: float = Field(120.0, gt=0, description="For a swap, the reading of the weights included.")
    call_timeout_s: float = Field(30.0, gt=0, description="For a single call of a server.")
    verify_target: bool = Field(
        True,
        description="Compare the target's checksum before and after a swap; costs a pass over its weights.",
    )
    log_share: float = Field(1.0, ge=0, le=1, description="Share of conversations that servers log.")
    log_by_default: bool = Field(True, description="Log requests that do not say whether they may be.")
    redact: str = Field("", description="module:function applied to each record on the server; may drop it.")
    target_top_k: int = Field(0, ge=0, le=64, description="Best target tokens logged for each verified slot.")
    buffer_records: int = Field(1024, ge=1, description="Records that wait for a slow log on a server.")
    admission_beta: float | None = Field(
        None, gt=0, lt=1, description="β of the admission estimate (AdaFlash §3.3); null leaves it to SGLang."
    )
    launch: LaunchConfig = LaunchConfig()
