"""The server's side of a hot swap: read a drafter directory, check it, put it in place, and take it back.

Two steps, so that requests wait for the second only. `stage` reads and checks in a thread while requests run; `commit` copies
the staged weights into the draft model between two scheduler steps. What served before stays in host memory: a commit
that fails puts it back, and so does `rollback`.

Every rank of a tensor-parallel group does the same, and none commits unless all could stage.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import torch
from torch import nn

from drafters.checkpoint import MANIFEST, LoadedDrafter, load_drafter
from drafters.d3d import D3DDrafter
from drafters.errors import UserError
from drafters.fill import Drafter
from drafters.length_head import LengthHead

_log = logging.getLogger(__name__)

Agree = Callable[[str | None], list[str]]
"""Tells the group this rank's problem and returns everyone's; the identity for a single rank."""


class SwapOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the client asks for, as JSON in place of the tensors of `/update_weights_from_tensor`.

    directory: below `swap_root`, as this server sees it.
    manifest_sha256: of `manifest.json`, which holds the sha256 of every other file.
    """

    step: Literal["stage", "commit", "rollback"]
    directory: str = ""
    manifest_sha256: str = ""


class Loadable(Protocol):
    """A draft model of the engine."""

    def load_weights(self, weights: Any) -> Any: ...

    def state_dict(self) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Served:
    """What a draft model holds, but for the weights themselves.

    directory: as the engine was started with, later the name below `swap_root`.
    """

    version: str
    directory: str
    length_head: LengthHead | None
    target_id: str


@dataclass
class Staging:
    """A drafter on its way."""

    order: SwapOrder
    thread: threading.Thread | None = None
    problem: str | None = None
    loaded: LoadedDrafter | None = None
    backup: dict[str, torch.Tensor] | None = None

    @property
    def ready(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


class SwapRefused(Exception):
    """The order cannot be carried out; nothing changed."""


def read_served(directory: str, target_id: str) -> Served:
    """What the engine loaded at its start; a directory without a manifest is named by the hash of its config.

    Raises:
        UserError: for a directory that has a manifest and differs from it.
    """
    path = Path(directory)
    if (path / MANIFEST).is_file():
        loaded = load_drafter(path)
        return Served(loaded.drafter_version, directory, loaded.length_head, loaded.identity.target_id)
    config = path / "config.json"
    name = hashlib.sha256(config.read_bytes()).hexdigest()[:12] if config.is_file() else directory
    return Served(f"unversioned-{name}", directory, None, target_id)


class DrafterStore:
    """Drafters of one draft model.

    Args:
        model: the engine's draft model.
        served: what it holds now.
        swap_root: directory below which drafters may be read; empty forbids swaps.
        max_bytes: of a drafter directory.
        agree: see `Agree`.
        after_load: rebuilds what the engine derived from the old weights.
    """

    def __init__(
        self,
        model: Loadable,
        served: Served,
        *,
        swap_root: str,
        max_bytes: int,
        agree: Agree = lambda problem: [problem] if problem else [],
        after_load: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.served = served
        self.previous: tuple[Served, dict[str, torch.Tensor]] | None = None
        self.swaps = 0
        self.failures = 0
        self.last_problem: str | None = None
        self._root = Path(swap_root).resolve() if swap_root else None
        self._max_bytes = max_bytes
        self._agree = agree
        self._after_load = after_load
        self._staging: Staging | None = None
        ours = Path(served.directory) / "config.json"
        self._config: dict[str, Any] | None = json.loads(ours.read_text()) if ours.is_file() else None

    def handle(self, payload: bytes) -> tuple[bool, str]:
        """Carry out an order; (success, message). Never raises: an exception would end the scheduler."""
        try:
            order = msgspec.json.decode(payload, type=SwapOrder)
            message = {"stage": self._stage, "commit": self._commit, "rollback": self._roll_back}[order.step](
                order
            )
        except (SwapRefused, msgspec.MsgspecError) as refusal:
            self._note(str(refusal))
            return False, str(refusal)
        except Exception as error:
            self._note(f"{type(error).__name__}: {error}")
            return False, f"unexpected, nothing was kept: {type(error).__name__}: {error}"
        return True, message

    def status(self) -> dict[str, Any]:
        """For status views and for the client, which waits for `staged`."""
        staging = self._staging
        return {
            "drafter_version": self.served.version,
            "directory": self.served.directory,
            "previous_version": self.previous[0].version if self.previous else None,
            "swaps": self.swaps,
            "failures": self.failures,
            "last_problem": self.last_problem,
            "staged": None
            if staging is None
            else {
                "manifest_sha256": staging.order.manifest_sha256,
                "ready": staging.ready,
                "problem": staging.problem if staging.ready else None,
            },
        }

    def wait_staged(self) -> None:
        """Until the thread of the latest `stage` is done; for tests and for `commit`."""
        if self._staging is not None and self._staging.thread is not None:
            self._staging.thread.join()

    def forget_staged(self) -> None:
        """Drop what is staged: its backup is of weights that are about to change, or have changed."""
        self.wait_staged()
        self._staging = None

    def _note(self, problem: str) -> None:
        self.failures += 1
        self.last_problem = problem
        _log.warning("draftsmith: swap refused: %s", problem)

    def _stage(self, order: SwapOrder) -> str:
        if self._staging is not None and not self._staging.ready:
            raise SwapRefused("another drafter is being staged; wait for it")
        directory = self._confined(order.directory)
        staging = Staging(order)
        staging.thread = threading.Thread(
            target=self._read, args=(staging, directory), name="draftsmith-stage", daemon=True
        )
        self._staging = staging
        staging.thread.start()
        return "staging"

    def _read(self, staging: Staging, directory: Path) -> None:
        try:
            self._check_size(directory)
            manifest = directory / MANIFEST
            if not manifest.is_file():
                raise SwapRefused(
                    f"{directory}: {MANIFEST} is missing, or the server cannot see the directory"
                )
            found = hashlib.sha256(manifest.read_bytes()).hexdigest()
            if found != staging.order.manifest_sha256:
                raise SwapRefused(
                    f"{manifest}: sha256 {found[:12]}…, the order names {staging.order.manifest_sha256[:12]}…"
                )
            loaded = load_drafter(directory)
            self._check_fits(loaded, directory)
            staging.backup = {
                name: tensor.detach().to("cpu", copy=True) for name, tensor in self.model.state_dict().items()
            }
            staging.loaded = loaded
        except (SwapRefused, UserError) as problem:
            staging.problem = str(problem)
        except Exception as error:
            staging.problem = f"{directory}: {type(error).__name__}: {error}"
        if staging.problem is not None:
            self._note(staging.problem)

    def _commit(self, order: SwapOrder) -> str:
        self.wait_staged()
        staging, self._staging = self._staging, None
        problem = None
        if staging is None or staging.order.manifest_sha256 != order.manifest_sha256:
            problem = "this drafter is not staged"
        elif staging.problem is not None:
            problem = staging.problem
        problems = self._agree(problem)
        if problems:
            raise SwapRefused("; ".join(sorted(set(problems))))
        assert staging is not None and staging.loaded is not None and staging.backup is not None
        loaded = staging.loaded
        problem = None
        try:
            self.model.load_weights(engine_weights(loaded.drafter))
            self._after_load()
        except Exception as error:
            problem = f"loading failed: {type(error).__name__}: {error}"
        problems = self._agree(problem)
        if problems:
            self._restore(staging.backup)
            raise SwapRefused(f"{'; '.join(sorted(set(problems)))}; the last good drafter is back")
        self.previous = (self.served, staging.backup)
        self.served = Served(
            loaded.drafter_version, staging.order.directory, loaded.length_head, loaded.identity.target_id
        )
        self.swaps += 1
        return f"serving {self.served.version}"

    def _roll_back(self, order: SwapOrder) -> str:
        del order
        problems = self._agree(None if self.previous else "there is no earlier drafter to go back to")
        if problems:
            raise SwapRefused("; ".join(sorted(set(problems))))
        assert self.previous is not None
        self.forget_staged()
        served, backup = self.previous
        self._copy_back(backup)
        self.served, self.previous = served, None
        self._after_load()
        self.swaps += 1
        return f"serving {self.served.version}"

    def _restore(self, backup: dict[str, torch.Tensor]) -> None:
        self._copy_back(backup)
        self._after_load()

    @torch.no_grad()
    def _copy_back(self, backup: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(backup[name])

    def _confined(self, directory: str) -> Path:
        if self._root is None:
            raise SwapRefused("this server allows no hot swaps: its plugin has no swap_root")
        path = (self._root / directory).resolve()
        if not path.is_relative_to(self._root):
            raise SwapRefused(f"{directory}: outside the server's swap_root")
        return path

    def _check_size(self, directory: Path) -> None:
        try:
            size = sum(entry.stat().st_size for entry in directory.iterdir())
        except OSError as error:
            raise SwapRefused(f"{directory}: this server cannot read it ({error})") from None
        if size > self._max_bytes:
            raise SwapRefused(f"{directory}: {size} bytes, more than max_drafter_bytes {self._max_bytes}")

    def _check_fits(self, loaded: LoadedDrafter, directory: Path) -> None:
        """Refuse a drafter that is whole in itself but not of the served one's shape or target."""
        if self.served.target_id and loaded.identity.target_id != self.served.target_id:
            raise SwapRefused(
                f"{directory}: made for target {loaded.identity.target_id}, this server runs "
                f"{self.served.target_id}"
            )
        if self._config is None:
            return
        expected, found = dict(self._config), json.loads((directory / "config.json").read_text())
        for config in (expected, found):
            if config.get("d3d_config"):
                config["d3d_config"] = {"shift": False, **config["d3d_config"]}
        for key in (*SHAPE_KEYS, *(LM_KEYS if expected.get("d3d_config") else ())):
            if expected.get(key) != found.get(key):
                raise SwapRefused(
                    f"{directory}: {key} is {found.get(key)}, the served drafter has {expected.get(key)}; "
                    "restart the server for another shape"
                )


def engine_weights(drafter: Drafter) -> list[tuple[str, torch.Tensor]]:
    """Weights by the names in the checkpoint, which is what an engine's `load_weights` knows."""
    if isinstance(drafter, D3DDrafter):
        # of a head tied to its embedding the checkpoint has one, and so have the parameters
        return [(name, parameter.detach()) for name, parameter in drafter.lm.named_parameters()]
    return list(drafter.state_dict().items())


SHAPE_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "block_size",
    "dflash_config",
    "d3d_config",
    "rope_theta",
    "rope_scaling",
    "layer_types",
    "rms_norm_eps",
    "hidden_act",
)
"""Of `config.json`: what the engine built its draft model from and cannot change while it runs."""

LM_KEYS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
"""More of them for a drafter that is a whole language model; a DFlash drafter's file may leave them out."""


def checked_module(model: nn.Module) -> Loadable:
    """The engine's draft model as something to load into.

    Raises:
        SwapRefused: when it is not.
    """
    if not callable(getattr(model, "load_weights", None)):
        raise SwapRefused(f"{type(model).__name__} has no load_weights")
    return model  # type: ignore[return-value]
