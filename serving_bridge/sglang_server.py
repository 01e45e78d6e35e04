"""A running SGLang server as a `DraftServer`: hot swaps that either happen whole or leave the last good drafter.

Two routes. With the plugin, the server itself reads the drafter from a directory both sides see, checks it while requests
run, and puts it in place between two steps (`directory`). A stock server takes the tensors through shared memory, on the same
machine only, and knows nothing of checks: they are made here, before anything is sent (`tensors`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from drafters.checkpoint import MANIFEST, drafter_digest, file_sha256, load_drafter, verify_manifest
from drafters.errors import UserError
from serving_bridge.server import ServerLost, SwapError, SwapReport
from serving_bridge.sglang_http import Pause, SGLangClient, plugin_status_of
from serving_bridge.sglang_plugin import SWAP_FORMAT
from serving_bridge.sglang_plugin.drafter_store import SHAPE_KEYS

KEPT_DRAFTERS = 4
"""Directories kept below a drafter root beside those in use."""


class SGLangServer:
    """One server.

    Args:
        client: talks to it.
        drafter_root: directory that the server knows as its plugin's `swap_root`; None for a stock server.
        last_good: checkpoint that a stock server runs; the plugin's tells itself.
        deadline_s: for a swap as a whole, the reading of the weights included.
        verify_target: compare the target's checksum before and after; costs the server a pass over its weights.
        settle_s: how long a server that fell silent in the middle of a swap is asked what it serves.
    """

    def __init__(
        self,
        client: SGLangClient,
        *,
        drafter_root: Path | None = None,
        last_good: Path | None = None,
        deadline_s: float = 120.0,
        verify_target: bool = True,
        settle_s: float = 15.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.client = client
        self.drafter_root = drafter_root
        self.last_good = last_good
        self.deadline_s = deadline_s
        self.verify_target = verify_target
        self.settle_s = settle_s
        self._before: Path | None = None
        self._sleep = sleep

    @property
    def drafter_version(self) -> str:
        info = self.client.server_info()
        status = plugin_status_of(info)
        if status is not None:
            return str(status["drafter"]["drafter_version"])
        return self.client.weight_version()

    def resume(self) -> None:
        """See `DraftServer`."""
        self.client.resume()

    def swap(self, directory: Path) -> SwapReport:
        """See `DraftServer`.

        Raises:
            ServerLost: no answer, so that it is not known what the server runs.
        """
        try:
            manifest = verify_manifest(directory)
        except UserError as error:
            raise SwapError(f"swap refused: {error}") from error
        info = self.client.server_info()
        status = plugin_status_of(info)
        if status is None:
            return self._swap_tensors(directory, manifest, info)
        return self._swap_directory(directory, manifest, status)

    def roll_back(self) -> str:
        """Bring back the drafter before the latest swap and return its version (plugin only)."""
        status = self.client.plugin_status()
        if status is None:
            raise SwapError(
                f"{self.client.url}: rolling back on the server needs the plugin; swap the older drafter in"
            )
        with self.client.paused():
            self._order("rollback")
        return self.drafter_version

    def take_back(self) -> str:
        """Undo the swap that this object made last, whatever the route; the version then serving."""
        if self._before is not None:
            return self.swap(self._before).new_version
        return self.roll_back()

    # through a directory

    def _swap_directory(
        self, directory: Path, manifest: dict[str, Any], status: dict[str, Any]
    ) -> SwapReport:
        old, new = str(status["drafter"]["drafter_version"]), str(manifest["drafter_version"])
        self._check_plugin(status, manifest)
        placed = self._place(directory)
        digest = file_sha256(placed / MANIFEST)
        draft_before, target_before = self._checksums()
        deadline = time.monotonic() + self.deadline_s
        with self.client.paused() as first_pause:
            self._order("stage", placed.name, digest)
        self._wait_staged(digest, deadline)
        try:
            with self.client.paused() as pause:
                self._order("commit", placed.name, digest, weight_version=new)
            draft_after, target_after = self._checksums()
            if target_after != target_before:
                raise SwapError(f"{self.client.url}: the target's weights changed during the swap")
            if (version := self.drafter_version) != new:
                raise SwapError(f"{self.client.url}: reports version {version} after a swap to {new}")
        except SwapError as error:
            # whatever the answer was, or if there was none: the server may have committed
            if self._put_back(old, error):
                raise type(error)(f"{error}; rolled back to {old}") from error
            raise
        self._tidy(placed.name, Path(str(status["drafter"]["directory"])).name)
        paused_ms = first_pause.milliseconds + pause.milliseconds
        return SwapReport(old, new, draft_after, target_after, paused_ms, draft_before, "directory")

    def _put_back(self, old: str, problem: SwapError) -> bool:
        """Make sure that the old drafter serves, unpaused; whether it had to be put back.

        Raises:
            ServerLost: when that is not to be had within `settle_s`.
        """
        deadline = time.monotonic() + self.settle_s
        while True:
            try:
                changed = self.drafter_version != old
                if changed:
                    self.roll_back()
                self.client.resume()
                return changed
            except SwapError as second:
                lost = isinstance(second, ServerLost)
                if not lost or time.monotonic() > deadline:
                    raise ServerLost(f"{problem}; and {old} could not be put back ({second})") from problem
            self._sleep(0.5)

    def _check_plugin(self, status: dict[str, Any], manifest: dict[str, Any]) -> None:
        if status.get("missing_hooks"):
            raise SwapError(
                f"{self.client.url}: the plugin is not whole ({status['missing_hooks']} missing); "
                "see `draftsmith doctor --sglang`"
            )
        if self.drafter_root is None:
            raise SwapError(
                f"{self.client.url}: serves with the plugin; give the directory that it knows as swap_root "
                "(sglang.drafter_root)"
            )
        if manifest.get("block_size") != status["block_size"]:
            raise SwapError(
                f"swap refused: block size {manifest.get('block_size')}, the server runs {status['block_size']}"
            )

    def _place(self, directory: Path) -> Path:
        """A copy below the drafter root, named by what it holds, there whole or not at all."""
        assert self.drafter_root is not None
        self.drafter_root.mkdir(parents=True, exist_ok=True)
        place = self.drafter_root / f"drafter-{drafter_digest(directory)[:16]}"
        if place.is_dir():
            try:
                if verify_manifest(place) == verify_manifest(directory):
                    place.touch()
                    return place
            except UserError:
                pass
            shutil.rmtree(place)
        staging = Path(tempfile.mkdtemp(prefix=".incoming.", dir=self.drafter_root))
        try:
            shutil.copytree(directory, staging, dirs_exist_ok=True)
            staging.chmod(0o755)
            staging.touch()
            staging.rename(place)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise SwapError(f"{self.drafter_root}: cannot hold the drafter ({error})") from error
        return place

    def _tidy(self, *in_use: str) -> None:
        """Old drafters leave, the most recent ones stay for rollbacks. The swap is done: nothing here may fail it."""
        assert self.drafter_root is not None
        served = ""
        with contextlib.suppress(SwapError):
            status = self.client.plugin_status()
            served = Path(status["drafter"]["directory"]).name if status else ""
        for left in self.drafter_root.glob(".incoming.*"):
            # of a client that was killed; a copy under way is younger
            if time.time() - left.stat().st_mtime > 3600:
                shutil.rmtree(left, ignore_errors=True)
        placed = sorted(self.drafter_root.glob("drafter-*"), key=lambda p: p.stat().st_mtime, reverse=True)
        for old in placed[KEPT_DRAFTERS:]:
            if old.name not in {served, *in_use}:
                shutil.rmtree(old, ignore_errors=True)

    def _wait_staged(self, digest: str, deadline: float) -> None:
        while True:
            status = self.client.plugin_status() or {}
            staged = (status.get("drafter") or {}).get("staged")
            if not staged or staged["manifest_sha256"] != digest:
                raise SwapError(f"{self.client.url}: forgot the drafter it was staging; was it restarted?")
            if staged["ready"]:
                if staged["problem"]:
                    raise SwapError(f"{self.client.url}: refused: {staged['problem']}")
                return
            if time.monotonic() > deadline:
                raise SwapError(f"{self.client.url}: still reading the drafter after {self.deadline_s:.0f} s")
            self._sleep(0.05)

    def _order(
        self, step: str, directory: str = "", digest: str = "", weight_version: str | None = None
    ) -> None:
        order = {"step": step, "directory": directory, "manifest_sha256": digest}
        self.client.post(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": [base64.b64encode(json.dumps(order).encode()).decode()],
                "load_format": SWAP_FORMAT,
                "selector": "draft",
                "flush_cache": False,
                "weight_version": weight_version,
            },
        )

    def _checksums(self) -> tuple[str, str]:
        return self.client.checksum("draft"), self.client.checksum("target") if self.verify_target else ""

    # through shared memory

    def _swap_tensors(self, directory: Path, manifest: dict[str, Any], info: dict[str, Any]) -> SwapReport:
        last_good = self.last_good or _path_of(info.get("speculative_draft_model_path"))
        if last_good is None:
            raise SwapError(
                f"{self.client.url}: a stock server, and its present drafter is not at hand to go back to; give it"
            )
        if str(info.get("device", "")).startswith("cuda"):
            raise SwapError(
                f"{self.client.url}: a stock server on a GPU keeps copies of the draft's weights that a swap would "
                "leave stale; install the plugin"
            )
        _check_fits(directory, last_good)
        old, new = self.client.weight_version(), str(manifest["drafter_version"])
        ranks = int(info.get("tp_size", 1))
        draft_before, target_before = self._checksums()
        # outside the `try`: as long as nothing was sent, there is nothing to put back
        with SharedTensors(directory, ranks) as payload:
            try:
                pause = self._push(payload, new)
                draft_after, target_after = self._checksums()
                if target_after != target_before:
                    raise SwapError(f"{self.client.url}: the target's weights changed during the swap")
            except ServerLost:
                raise
            except SwapError as error:
                try:
                    with SharedTensors(last_good, ranks) as older:
                        self._push(older, old)
                except SwapError as second:
                    raise ServerLost(
                        f"{error}; and the last good drafter could not be put back ({second}): restart the server"
                    ) from error
                raise
        self._before, self.last_good = last_good, directory
        return SwapReport(
            old,
            new,
            draft_after,
            target_after,
            pause.milliseconds,
            draft_before,
            "tensors",
            "the prefix cache keeps entries of the old drafter; drafts after a cached prefix are worse until they age out",
        )

    def _push(self, payload: list[str], version: str) -> Pause:
        with self.client.paused() as pause:
            self._begin()
            try:
                self.client.post(
                    "/update_weights_from_tensor",
                    {
                        "serialized_named_tensors": payload,
                        "load_format": None,
                        "selector": "draft",
                        "flush_cache": False,
                        "weight_version": version,
                    },
                )
            finally:
                self.client.post("/end_weight_update", {})
        return pause

    def _begin(self) -> None:
        try:
            self.client.post("/begin_weight_update", {"selector": "draft"})
        except SwapError as error:
            if "already open" not in str(error):
                raise
            # left open by a client that was killed
            self.client.post("/end_weight_update", {})
            self.client.post("/begin_weight_update", {"selector": "draft"})


class SharedTensors:
    """A checkpoint's tensors in shared memory, as one payload for each rank, for as long as the `with` block lasts.

    A process of its own holds them: sharing by file name is a setting of the whole process, and leaves a helper process
    behind that keeps the parent's output open.
    """

    def __init__(self, directory: Path, ranks: int) -> None:
        self.directory = directory
        self.ranks = ranks
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> list[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "serving_bridge.share_tensors", str(self.directory / "model.safetensors")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        payload = self._process.stdout.readline().strip()
        if not payload:
            self.__exit__()
            raise SwapError(f"{self.directory}: its tensors could not be shared")
        # every rank gets all tensors and takes its own part: the engine's loaders cut them
        return [payload] * self.ranks

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            # the end of its input tells it to leave
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.stdout.close()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _check_fits(directory: Path, last_good: Path) -> None:
    """A stock server ends itself over a tensor of the wrong shape, so nothing of the kind may reach it."""
    try:
        new, old = load_drafter(directory), load_drafter(last_good)
    except UserError as error:
        raise SwapError(f"swap refused: {error}") from error
    if new.identity != old.identity:
        raise SwapError(
            f"swap refused: {directory} is made for target {new.identity.target_id}, the served drafter for "
            f"{old.identity.target_id}"
        )
    ours, theirs = _shapes(directory), _shapes(last_good)
    if ours != theirs:
        differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        raise SwapError(
            f"swap refused: {directory} differs from the served drafter in the shape of {', '.join(differing[:3])}"
        )
    mine, yours = (json.loads((d / "config.json").read_text()) for d in (directory, last_good))
    for key in SHAPE_KEYS:
        if mine.get(key) != yours.get(key):
            raise SwapError(
                f"swap refused: {directory}: {key} is {mine.get(key)}, the served drafter has {yours.get(key)}"
            )


def _shapes(directory: Path) -> dict[str, list[int]]:
    with safe_open(directory / "model.safetensors", "pt") as tensors:
        return {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def _path_of(value: Any) -> Path | None:
    path = Path(value) if isinstance(value, str) else None
    return path if path is not None and (path / "model.safetensors").is_file() else None
