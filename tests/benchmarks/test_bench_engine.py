"""`evenhand bench engine` on the stub engine: the report, its counts, arrival times, --dump, error lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.cli import DEFAULT_SOURCE, app
from benchmarks.engine import RequestLog, RunLog, run_workload
from benchmarks.figures import decode, figures, median_run
from benchmarks.make_workloads import Texts
from benchmarks.workload import (
    BenchmarkError,
    BenchmarkRequest,
    WorkloadRow,
    other_prompts,
    read_workload,
    tokenise,
)
from engine_actor.build import BuiltEngine, EngineOptions, build_engine
from engine_actor.executor import Runner
from engine_actor.loading.source import resolve_source
from engine_actor.scheduler import Scheduler
from engine_actor.step import StepRecord, StepResult
from engine_actor.stub_runner import STUB_TEXT, StubRunner
from serve_app.text.load import load_tokenizer
from serve_app.text.tokenizer import byte_tokenizer

WORKLOADS = Path(__file__).parents[2] / "benchmarks" / "workloads"
STATED_KEYS = {
    "requests",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "seconds",
    "output_tokens_per_s",
    "ttft_ms",
    "itl_ms",
    "groups",
    "steps",
    "scheduler_ms_per_step",
    "model_ms_per_step",
    "dtype",
    "quantization",
    "attention_backend",
    "threads",
}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def invoke(workload: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["engine", "--workload", str(workload), "--engine", "stub", *arguments])


def report(workload: Path, *arguments: str) -> dict[str, Any]:
    result = invoke(workload, "--json", *arguments)
    assert result.exit_code == 0, result.output
    loaded = json.loads(result.stdout)
    assert isinstance(loaded, dict)
    return loaded


def error_line(workload: Path, *arguments: str) -> str:
    result = invoke(workload, "--json", *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return str(lines[0])


def test_report_and_dump(tmp_path: Path) -> None:
    workload = write(
        tmp_path / "w.jsonl",
        {"prompt": "twenty bytes of text", "max_tokens": 7, "group": "text"},
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 4, "group": "ids", "tenant": "beta"},
        {"prompt_token_ids": [9], "max_tokens": 1},
    )
    dump = tmp_path / "out.jsonl"
    figures = report(workload, "--dump", str(dump))
    assert figures.keys() >= STATED_KEYS
    assert (figures["requests"], figures["input_tokens"], figures["output_tokens"]) == (3, 24, 12)
    assert figures["cached_tokens"] == 0
    assert (
        figures["steps"] == 7
    )  # all prompts fit the first step, and the longest output takes one step a token
    # `seconds` is printed rounded, and the run lasts a few hundredths of one.
    assert 12 / figures["output_tokens_per_s"] == pytest.approx(figures["seconds"], abs=1e-3)
    assert figures["ttft_ms"].keys() == {"p50", "p95"}
    assert figures["itl_ms"].keys() == {"p50", "p95", "p99", "max"}
    assert figures["groups"].keys() == {"text", "ids"}
    assert figures["groups"]["text"].keys() == {"max_gap_ms", "median_gap_ms", "ttft_ms"}
    assert figures["model_ms_per_step"] >= 5  # the stub's pace
    assert 0 < figures["scheduler_ms_per_step"] < figures["model_ms_per_step"]
    assert (figures["dtype"], figures["executor"], figures["threads"]) == ("none", "stub", 1)

    rows = [json.loads(line) for line in dump.read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert [len(row["token_ids"]) for row in rows] == [7, 4, 1]
    endless = STUB_TEXT * 10
    assert bytes(rows[0]["token_ids"]) == endless[20:27]  # the stub's bytes follow the position


def test_table_for_people(tmp_path: Path) -> None:
    workload = write(tmp_path / "w.jsonl", {"prompt_token_ids": [1], "max_tokens": 1, "group": "only"})
    result = invoke(workload, "--repeat", "2")
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["output_tokens"] == "1"
    assert lines["itl_ms"] == "p50 -  p95 -  p99 -  max -"  # one token has no gap
    assert len(lines["runs_output_tokens_per_s"].split()) == 2


def test_prefix_cache_is_off_unless_asked_for_and_cold_for_the_timed_run(tmp_path: Path) -> None:
    prompt = list(range(64))
    workload = write(
        tmp_path / "w.jsonl",
        {"prompt_token_ids": prompt, "max_tokens": 2},
        {"prompt_token_ids": prompt, "max_tokens": 2, "arrival_s": 0.3},
    )
    assert report(workload)["cached_tokens"] == 0
    # The second request finds the first one's pages but the last; the first finds nothing, in no run.
    assert report(workload, "--prefix-cache", "--repeat", "2")["cached_tokens"] == 48


def test_limits_reach_the_scheduler(tmp_path: Path) -> None:
    workload = write(tmp_path / "w.jsonl", *[{"prompt_token_ids": [1] * 16, "max_tokens": 3}] * 4)
    one_by_one = report(workload, "--max-num-seqs", "1", "--max-num-batched-tokens", "16")
    assert one_by_one["steps"] == 12
    assert (one_by_one["max_num_seqs"], one_by_one["max_num_batched_tokens"]) == (1, 16)


def test_budgets_are_compared_in_one_report(tmp_path: Path) -> None:
    rows = [{"prompt_token_ids": [1] * 40, "max_tokens": 6}] * 2
    workload = write(tmp_path / "w.jsonl", *rows)
    budgets = ["--budget", "8", "--budget", "32", "--budget", "128"]
    figures = report(workload, "--max-num-batched-tokens", "32", "--repeat", "2", *budgets)
    assert [line["max_num_batched_tokens"] for line in figures["budgets"]] == [8, 32, 128]
    assert max(line["of_best"] for line in figures["budgets"]) == 1.0
    assert all(line["max_gap_ms"] in line["runs_max_gap_ms"] for line in figures["budgets"])
    own = figures["budgets"][1]
    # The report itself is that of the engine's own budget.
    assert (own["output_tokens_per_s"], figures["max_num_batched_tokens"]) == (
        figures["output_tokens_per_s"],
        32,
    )
    assert (own["max_gap_ms"], len(own["runs_max_gap_ms"])) == (figures["itl_ms"]["max"], 2)
    assert "budgets" not in report(workload)
    lines = invoke(workload, *budgets).stdout.splitlines()
    assert next(line.split()[:3] for line in lines if line.startswith("budget")) == [
        "budget",
        "max_num_batched_tokens",
        "8",
    ]


def test_a_sequential_run_has_one_request_at_a_time(tmp_path: Path) -> None:
    prompt = list(range(64))
    rows = [{"prompt_token_ids": prompt, "max_tokens": 3, "arrival_s": 50.0}] * 3
    figures = report(write(tmp_path / "w.jsonl", *rows), "--sequential", "--prefix-cache")
    assert figures["steps"] == 9 and figures["seconds"] < 50
    assert figures["cached_tokens"] == 2 * 48
    assert figures["decode"]["rows_per_step"] == 1.0
    assert figures["ttft_ms"]["p95"] < figures["seconds"] * 1e3 / 2  # from its own start, not the run's


def test_model_and_limits_of_a_config_file(tmp_path: Path) -> None:
    workload = write(tmp_path / "w.jsonl", {"prompt_token_ids": [1], "max_tokens": 1})
    config = tmp_path / "config.yaml"
    config.write_text(
        """
applications:
  - import_path: serve_app.app:build
    args:
      models:
        - {id: m, source: nowhere, scheduler: {max_num_seqs: 3, max_num_batched_tokens: 32}}
"""
    )
    figures = report(workload, "--config", str(config), "--max-num-seqs", "5")
    assert (figures["max_num_seqs"], figures["max_num_batched_tokens"]) == (5, 32)


def test_is_a_command_of_evenhand() -> None:
    from serve_app.cli import app as evenhand

    result = CliRunner().invoke(evenhand, ["bench", "engine", "--help"])
    assert result.exit_code == 0
    assert "--workload" in result.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "a JSON object is expected"),
        ('{"prompt": "a"}', "max_tokens: is missing"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: 0 is not allowed; allowed: at least 1"),
        ('{"prompt": "a", "max_tokens": "9"}', "max_tokens: '9' is not allowed; allowed: an integer"),
        ('{"max_tokens": 1}', "give exactly one of prompt and prompt_token_ids"),
        ('{"prompt": "a", "prompt_token_ids": [1], "max_tokens": 1}', "give exactly one of"),
        ('{"prompt_token_ids": [], "max_tokens": 1}', "prompt_token_ids: an empty list is not allowed"),
        ('{"prompt_token_ids": [3, -1], "max_tokens": 1}', "prompt_token_ids[1]: -1 is not allowed"),
        ('{"prompt_token_ids": [259], "max_tokens": 1}', "prompt_token_ids: 259 is not allowed"),
        ('{"prompt": "a", "max_tokens": 1, "arrival_s": -1}', "arrival_s: -1 is not allowed"),
        (
            '{"prompt": "a", "max_tokens": 1, "arival_s": 1}',
            "arival_s: unknown key (did you mean arrival_s?)",
        ),
        ('{"prompt": "abc", "max_tokens": 8190}', "max_tokens: 3 prompt tokens and 8190 more do not fit"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    workload = tmp_path / "w.jsonl"
    workload.write_text(f'{{"prompt": "a", "max_tokens": 1}}\n\n{line}\n')
    error = error_line(workload)
    assert f"{workload}:3: " in error
    assert message in error


def test_other_mistakes_are_one_line(tmp_path: Path) -> None:
    workload = write(tmp_path / "w.jsonl", {"prompt": "a", "max_tokens": 1})
    (tmp_path / "empty.jsonl").write_text("\n")
    assert error_line(tmp_path / "none.jsonl").endswith("none.jsonl: no such file")
    assert error_line(tmp_path / "empty.jsonl").endswith("empty.jsonl: holds no requests")
    assert "quantization: 'int3' is not allowed; allowed: none, int8, int4" in error_line(
        workload, "--quantization", "int3"
    )
    assert "dtype: 'int4' is not allowed" in error_line(workload, "--dtype", "int4")
    assert "scheduler.max_num_seqs: 0 is not allowed" in error_line(workload, "--max-num-seqs", "0")
    assert "no.yaml: no such file" in error_line(workload, "--config", str(tmp_path / "no.yaml"))
    assert "cannot be written" in error_line(workload, "--dump", str(tmp_path / "no" / "out.jsonl"))


class FailingRunner(Runner):
    """Computes two steps and raises in the third."""

    def __init__(self) -> None:
        self._stub = StubRunner(64, step_seconds=0.0)
        self.info, self.num_pages = self._stub.info, 64

    def run(self, record: StepRecord) -> StepResult:
        if record.step == 3:
            raise RuntimeError("out of order")
        return self._stub.run(record)


def stub_engine() -> BuiltEngine:
    return build_engine(EngineOptions(source="", engine="stub", prefix_caching=False))


def test_an_engine_that_fails_ends_the_run() -> None:
    built = BuiltEngine(FailingRunner(), stub_engine().scheduler, 259)
    late = BenchmarkRequest("w:2", [1], max_tokens=1, arrival_s=3600.0)
    with pytest.raises(BenchmarkError, match="the engine failed: RuntimeError: out of order"):
        run_workload(built, [BenchmarkRequest("w:1", [1], max_tokens=9), late])


def test_an_engine_that_fails_ends_a_sequential_run() -> None:
    built = BuiltEngine(FailingRunner(), stub_engine().scheduler, 259)
    requests = [BenchmarkRequest("w:1", [1], max_tokens=2)] * 3
    with pytest.raises(BenchmarkError, match="the engine failed: RuntimeError: out of order"):
        run_workload(built, requests, sequential=True)


def test_a_kept_scheduler_takes_the_same_requests_again_and_knows_their_prompts() -> None:
    built = build_engine(EngineOptions(source="", engine="stub"))
    scheduler = Scheduler(built.scheduler, built.runner.num_pages)
    requests = [BenchmarkRequest("w:1", list(range(64)), max_tokens=2)]
    logs = [run_workload(built, requests, scheduler=scheduler) for _ in range(2)]
    assert [log.requests[0].cached_tokens for log in logs] == [0, 48]


def test_decode_steps_are_those_without_any_prompt() -> None:
    requests = [BenchmarkRequest(f"w:{i}", [1] * 20, max_tokens=n) for i, n in enumerate((5, 3))]
    built = stub_engine()
    run = run_workload(built, requests)
    assert decode(run) is not None
    run.step_seconds = [9.0, 0.1, 0.1, 0.2, 0.2]  # the first step holds both prompts
    assert decode(run) == {"steps": 4, "rows_per_step": 1.5, "output_tokens_per_s": 10.0}
    run.records, run.step_seconds = run.records[:1], [9.0]
    assert decode(run) is None


def test_requests_wait_for_their_arrival_and_are_timed_from_it() -> None:
    early = BenchmarkRequest("w:1", [1] * 8, max_tokens=2)
    late = BenchmarkRequest("w:2", [2] * 8, max_tokens=2, arrival_s=0.4)
    # A file need not be in order of arrival.
    first, second = run_workload(stub_engine(), [late, early]).requests
    assert second.token_times[0] < first.token_times[0]
    assert first.token_times[0] > 0.4
    assert (first.arrival, second.arrival) == (0.4, 0.0)


def test_figures_of_a_known_run() -> None:
    requests = [
        BenchmarkRequest("w:1", [1, 2], max_tokens=4, group="a"),
        BenchmarkRequest("w:2", [3], max_tokens=1, arrival_s=1.0, group="b"),
    ]
    run = RunLog(
        [
            RequestLog(0.0, [9, 9, 9, 9], [0.5, 0.6, 0.7, 1.2], cached_tokens=1),
            RequestLog(1.0, [9], [1.25]),
        ],
        steps=5,
        scheduler_seconds=0.005,
        model_seconds=1.0,
    )
    report = figures(stub_engine(), requests, [run])
    assert report["seconds"] == 1.25
    assert report["output_tokens_per_s"] == 4.0
    assert report["cached_tokens"] == 1
    assert report["ttft_ms"]["p50"] == 375.0  # 500 ms, and 250 ms after its arrival
    assert report["itl_ms"]["max"] == 500.0
    assert report["itl_ms"]["p50"] == 100.0
    assert report["groups"]["a"] == {
        "max_gap_ms": 500.0,
        "median_gap_ms": 100.0,
        "ttft_ms": {"p50": 500.0, "p95": 500.0},
    }
    assert report["groups"]["b"]["max_gap_ms"] is None
    assert (report["scheduler_ms_per_step"], report["model_ms_per_step"]) == (1.0, 200.0)


def test_the_median_run_is_reported() -> None:
    runs = [RunLog([RequestLog(0.0, [1], [seconds])]) for seconds in (3.0, 1.0, 2.0, 4.0)]
    assert median_run(runs[:3]).seconds == 2.0
    assert median_run(runs).seconds == 3.0


def test_the_warm_up_shares_no_prompt_with_the_run() -> None:
    requests = [BenchmarkRequest("w:1", [0, 1, 258, 130], max_tokens=9, arrival_s=5.0)]
    (warm_up,) = other_prompts(requests, 259)
    assert len(warm_up.prompt_token_ids) == 4
    assert all(a != b for a, b in zip(warm_up.prompt_token_ids, requests[0].prompt_token_ids, strict=True))
    assert all(0 <= token < 259 for token in warm_up.prompt_token_ids)
    assert (warm_up.max_tokens, warm_up.arrival_s) == (3, 0.0)


def test_text_prompts_are_plain_text() -> None:
    (request,) = tokenise([("w:1", WorkloadRow(prompt="<|im_end|>", max_tokens=1))], byte_tokenizer())
    assert bytes(request.prompt_token_ids) == b"<|im_end|>"


@pytest.mark.parametrize(
    ("name", "prompts", "outputs"),
    [
        ("mixed48", (32, 700, 8000), (17, 224, 3464)),
        ("decode_heavy", (128, 128, 4096), (64, 64, 2048)),
        ("prefill_heavy", (750, 750, 12000), (16, 16, 256)),
        ("prefill1500", (1500, 1500, 1500), (1, 1, 1)),
        ("shared_prefix", (1032, 1032, 16 * 1032), (1, 1, 16)),
        ("long_among_streams", (32, 1500, 1756), (32, 400, 3232)),
        ("single", (106, 106, 106), (128, 128, 128)),
    ],
)
def test_the_shipped_workloads_are_what_their_page_says(
    name: str, prompts: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    tokenizer = load_tokenizer(resolve_source(DEFAULT_SOURCE))
    requests = tokenise(read_workload(WORKLOADS / f"{name}.jsonl"), tokenizer)
    lengths = [len(request.prompt_token_ids) for request in requests]
    limits = [request.max_tokens for request in requests]
    assert (min(lengths), max(lengths), sum(lengths)) == prompts
    assert (min(limits), max(limits), sum(limits)) == outputs
    starts = {tuple(request.prompt_token_ids[:998]) for request in requests}
    assert len(starts) == (1 if name == "shared_prefix" else len(requests))


def test_the_workload_maker_cuts_prompts_to_length_behind_a_prefix() -> None:
    tokenizer = load_tokenizer(resolve_source(DEFAULT_SOURCE))
    texts = Texts(tokenizer)
    prompts = [texts.prompt(40, prefix="The same words.\n\n") for _ in range(3)]
    assert {len(tokenizer.encode_text(prompt)) for prompt in prompts} == {40}
    assert len(set(prompts)) == 3 and all(prompt.startswith("The same words.") for prompt in prompts)
