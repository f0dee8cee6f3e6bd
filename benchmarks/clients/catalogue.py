"""The clients and how each is called: small, but everything that it usually asks of a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
WORKLOAD = Path(__file__).parent / "prompts.txt"


@dataclass(frozen=True)
class Target:
    """The server to call, and where the client may write."""

    base_url: str
    key: str
    model: str
    tokenizer: Path
    directory: Path


def last_line(output: str) -> str:
    """What a script of ours says at its end."""
    lines = output.strip().splitlines()
    return lines[-1] if lines else ""


@dataclass(frozen=True)
class Client:
    """One client. `expected` must be in its output; `command` begins with `python` or a program of its environment."""

    name: str
    package: str
    command: Callable[[Target], list[str]]
    expected: str = ""
    environment_name: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    summary: Callable[[str], str] = lambda output: ""


def _script(file: str) -> Callable[[Target], list[str]]:
    return lambda t: ["python", str(SCRIPTS / file), t.base_url, t.key, t.model]


_QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " Rome", " a"], "answer": 0},
    {"question": "One, two, three,", "choices": [" nine", " four", " x"], "answer": 1},
    {"question": "The opposite of hot is", "choices": [" cold", " warm", " hot"], "answer": 0},
]
_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
doc_to_text: "{{{{question}}}}"
"""
_CHOICE = """\
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
"""
_GENERATE = """\
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def _lm_eval(t: Target) -> list[str]:
    """Log-likelihoods of given answers (echo with log probabilities) and a generated one, on three questions."""
    tasks = t.directory / "tasks"
    tasks.mkdir(exist_ok=True)
    data = tasks / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in _QUESTIONS))
    for name, rest in (("evenhand_choice", _CHOICE), ("evenhand_generate", _GENERATE)):
        (tasks / f"{name}.yaml").write_text(_TASK.format(name=name, data=data) + rest)
    arguments = {
        "model": t.model,
        "base_url": f"{t.base_url}/v1/completions",
        "tokenizer": str(t.tokenizer),
        "tokenizer_backend": "huggingface",
        "num_concurrent": "4",
        "max_length": "2048",
    }
    return [
        *("lm_eval", "run", "--model", "local-completions", "--tasks", "evenhand_choice,evenhand_generate"),
        *("--include_path", str(tasks)),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
    ]


def _guidellm(t: Target) -> list[str]:
    return [
        *("guidellm", "run", "--tokenizer", f"kind=huggingface_auto,model={t.tokenizer}"),
        *("--backend", _guidellm_backend(t)),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=16"),
    ]


def _guidellm_backend(t: Target) -> str:
    return f"kind=openai_http,target={t.base_url},model={t.model},request_format=/v1/chat/completions,api_key={t.key}"


def _evalscope(t: Target) -> list[str]:
    return [
        *("evalscope", "perf", "--url", f"{t.base_url}/v1/chat/completions", "--api", "openai"),
        *("--model", t.model, "--api-key", t.key, "--tokenizer-path", str(t.tokenizer)),
        *("--dataset", "line_by_line", "--dataset-path", str(WORKLOAD), "--max-tokens", "8"),
        *("--parallel", "4", "--number", "16", "--extra-args", json.dumps({"ignore_eos": True})),
    ]


def _vllm(t: Target) -> list[str]:
    return [
        *(
            "python",
            str(SCRIPTS / "vllm_bench_serve.py"),
            "--backend",
            "openai-chat",
            "--base-url",
            t.base_url,
        ),
        *("--endpoint", "/v1/chat/completions", "--model", t.model, "--tokenizer", str(t.tokenizer)),
        *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8"),
        *("--num-prompts", "16", "--ignore-eos"),
    ]


CLIENTS = (
    Client("openai", "openai", _script("openai_sdk.py"), "content", "openai", summary=last_line),
    Client("openai async", "openai", _script("openai_async.py"), "content", "openai", summary=last_line),
    Client(
        "langchain-openai", "langchain_openai", _script("langchain_chat.py"), "content", "langchain-openai",
        summary=last_line,
    ),
    Client("lm-eval", "lm_eval", _lm_eval, "|evenhand_generate|", "lm-eval"),
    Client("guidellm", "guidellm", _guidellm, "successful=16 errored=0", "guidellm"),
    Client("evalscope", "evalscope", _evalscope, "(16 samples)", "evalscope"),
    Client("vllm bench serve", "vllm", _vllm, "Successful requests:                     16", "vllm"),
)  # fmt: skip
