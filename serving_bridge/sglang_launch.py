"""The command and environment that start SGLang with a drafter and the plugin."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from serving_bridge.sglang_cpu import environment as cpu_environment
from serving_bridge.sglang_plugin.settings import SETTINGS_VARIABLE, PluginSettings, without_password

IMAGE = "lmsysorg/sglang:v0.5.23"
"""SGLang's own image; the plugin is installed into it by `pip install --no-deps draftsmith`."""


@dataclass(frozen=True)
class Launch:
    """A server to be started.

    Attributes:
        python: of the environment that SGLang is installed in.
        model: the target, a directory or a hub name.
        drafter: serving checkpoint to begin with.
        preset: `cuda`, or `cpu` for tests and demos.
        host: loopback unless the server is to be reached from elsewhere, which needs `admin_key`.
        threads: CPU threads of the `cpu` preset.
        max_total_tokens, max_running, context_length: capacity; None leaves it to SGLang, except on the CPU.
        extra: further arguments, as SGLang spells them.
    """

    python: str
    model: str
    drafter: Path
    settings: PluginSettings
    preset: Literal["cuda", "cpu"] = "cuda"
    algorithm: Literal["DFLASH", "ADAFLASH", "D3D"] = "ADAFLASH"
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    admin_key: str | None = None
    threads: int = 1
    max_total_tokens: int | None = None
    max_running: int | None = None
    context_length: int | None = None
    extra: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.host not in {"127.0.0.1", "localhost", "::1"} and not self.admin_key:
            raise ValueError(
                f"--host {self.host}: reachable from other machines, so anyone there, or every user with the API key, could "
                "change what it serves; give an admin key"
            )

    def arguments(self) -> list[str]:
        """The command line."""
        words = [
            self.python, "-m", "sglang.launch_server",
            "--model-path", self.model,
            "--speculative-algorithm", self.algorithm,
            "--speculative-draft-model-path", str(self.drafter),
            "--host", self.host,
            "--port", str(self.port),
        ]  # fmt: skip
        capacity = {
            "--max-total-tokens": self.max_total_tokens,
            "--max-running-requests": self.max_running,
            "--context-length": self.context_length,
        }
        if self.preset == "cpu":
            words += ["--device", "cpu", "--attention-backend", "torch_native", "--grammar-backend", "none"]
            words += ["--mem-fraction-static", "0.1", "--skip-server-warmup", "--sleep-on-idle"]
            # a float32 target would be served in half precision, which its drafter is not
            words += ["--dtype", "bfloat16"]
            # without a bound SGLang would size its cache by the machine's whole memory
            capacity = {
                "--max-total-tokens": self.max_total_tokens or 8192,
                "--max-running-requests": self.max_running or 8,
                "--context-length": self.context_length or 1024,
            }
        for name, value in capacity.items():
            if value is not None:
                words += [name, str(value)]
        for name, key in (("--api-key", self.api_key), ("--admin-api-key", self.admin_key)):
            if key:
                words += [name, key]
        return [*words, *self.extra]

    def variables(self) -> dict[str, str]:
        """What the command needs in its environment beyond what is there."""
        settings = {SETTINGS_VARIABLE: msgspec.json.encode(self.settings).decode()}
        if self.preset == "cpu":
            settings |= cpu_environment(self.threads)
        return settings

    def environment(self) -> dict[str, str]:
        """The whole environment."""
        return {**os.environ, **self.variables()}

    def shown(self) -> str:
        """For a shell, one argument a line; keys are left out, as a screen is no place for them."""
        variables = [
            f"{name}={shlex.quote(without_password(value))}"
            for name, value in sorted(self.variables().items())
        ]
        lines = [""]
        for word in self._hidden():
            text = word if word.startswith("$") else shlex.quote(word)
            if word.startswith("--"):
                lines.append(text)
            else:
                lines[-1] = f"{lines[-1]} {text}".strip()
        return " \\\n  ".join([*variables, *lines])

    def _hidden(self) -> list[str]:
        words = list(self.arguments())
        for name in ("--api-key", "--admin-api-key"):
            if name in words:
                words[words.index(name) + 1] = "$" + name.strip("-").replace("-", "_").upper()
        return words

    def image_line(self) -> str:
        """The same in SGLang's container image."""
        inner = " ".join(shlex.quote(w) for w in ["python3", *self._hidden()[1:]])
        packages = "draftsmith redis" if self.settings.log.startswith("redis") else "draftsmith"
        log, root = self.settings.log.removeprefix("spool:"), self.settings.swap_root
        mounts = [str(self.drafter.absolute()), *(d for d in (log, root) if d.startswith("/"))]
        if Path(self.model).is_absolute():
            mounts.append(self.model)
        volumes = " ".join(f"-v {shlex.quote(m)}:{shlex.quote(m)}" for m in dict.fromkeys(mounts))
        settings = shlex.quote(f"{SETTINGS_VARIABLE}={without_password(self.variables()[SETTINGS_VARIABLE])}")
        return (
            f"docker run --gpus all --ipc=host --network=host {volumes} -e {settings} {IMAGE} "
            f"bash -c {shlex.quote(f'pip install --no-deps {packages} && exec {inner}')}"
        )
