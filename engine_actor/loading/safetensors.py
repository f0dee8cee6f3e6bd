"""Weights of a Hugging Face directory, in one safetensors file or in shards with an index."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine_actor.loading.config import read_json
from engine_actor.loading.source import LoadError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
# Frequencies that old checkpoints store though they follow from the configuration.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")


class SafetensorsWeights:
    """Tensors of a directory; each is read from its memory-mapped shard when asked for."""

    def __init__(self, directory: Path) -> None:
        """Raises LoadError naming shards or tensors that are missing, left over or not where the index
        says."""
        self._directory = directory
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for file in self._find_files():
            self._add(file)

    def _find_files(self) -> list[Path]:
        index = self._directory / INDEX
        shards = {file.name for file in self._directory.glob("*.safetensors") if _SHARD.fullmatch(file.name)}
        if not index.is_file():
            if shards:
                raise LoadError(
                    f"{self._directory}: there are shards but no {INDEX}: {', '.join(sorted(shards))}"
                )
            if not (self._directory / SINGLE).is_file():
                raise LoadError(f"{self._directory}: neither {SINGLE} nor {INDEX} found")
            return [self._directory / SINGLE]
        weight_map: dict[str, str] = read_json(index).get("weight_map", {})
        named = set(weight_map.values())
        missing = sorted(name for name in named if not (self._directory / name).is_file())
        if missing:
            raise LoadError(f"{index}: shards named but not there: {', '.join(missing)}")
        if shards - named:
            raise LoadError(f"{index}: shards there but not named: {', '.join(sorted(shards - named))}")
        files = [self._directory / name for name in sorted(named)]
        self._check_index(index, weight_map, files)
        return files

    def _check_index(self, index: Path, weight_map: dict[str, str], files: list[Path]) -> None:
        stored = {name: file.name for file in files for name in _tensor_names(file)}
        wrong = sorted(name for name, file in weight_map.items() if stored.get(name) != file)
        if wrong:
            raise LoadError(f"{index}: tensors not in the shard that the index names: {', '.join(wrong)}")

    def _add(self, file: Path) -> None:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if _DERIVED.fullmatch(name):
                    continue
                if name in self._files:
                    raise LoadError(f"tensor {name} is in both {self._files[name].name} and {file.name}")
                self._files[name] = file
                self.shapes[name] = tuple(tensors.get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """One tensor in its stored type."""
        with _open(self._files[name]) as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor


def _tensor_names(file: Path) -> list[str]:
    with _open(file) as tensors:
        return list(tensors.keys())


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file}: not readable as safetensors ({error})") from error
