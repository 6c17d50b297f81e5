"""What it costs that answers follow a grammar: tokens per second of constrained beside unconstrained requests.

    python -m benchmarks.stack.structured_output [--model FOLDER] [--batch 32] [--rounds 7] [--json]

`coppice.LLM` in one process, all requests at once, as many tokens each: `array` is a JSON schema of a long list,
`regex` a run of words. `mixed` is half and half: its unconstrained requests must give the tokens that they give alone,
or the benchmark ends with an error. Ratios are medians over rounds, in which the kinds take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from coppice import LLM, SamplingOptions
from coppice_bench.report import describe_run, print_report, warn_if_busy

ARRAY = {"json": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 200}}
WORDS = {"regex": r"([a-z]{1,9} ){200}"}
PROMPTS = [f"Once upon a time there were {number} friends who" for number in range(1_000)]


def options(batch: int, max_tokens: int, forms: list[dict[str, Any] | None]) -> list[SamplingOptions]:
    """Of a batch whose requests take `forms` in turns; nobody ends before `max_tokens`."""
    return [
        SamplingOptions(
            max_tokens=max_tokens,
            temperature=1.0,
            seed=place,
            ignore_eos=forms[place % len(forms)] is None,
            structured_outputs=forms[place % len(forms)],
        )
        for place in range(batch)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="checkpoint folder; default: the demo model")
    parser.add_argument("--batch", type=int, default=32, help="requests at once")
    parser.add_argument("--max-tokens", type=int, default=100, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    arguments = parser.parse_args()
    warn_if_busy()
    llm = LLM(arguments.model, threads=arguments.threads)
    prompts = PROMPTS[: arguments.batch]
    kinds: dict[str, list[dict[str, Any] | None]] = {
        "unconstrained": [None],
        "array": [ARRAY],
        "regex": [WORDS],
        "mixed": [None, ARRAY],
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    free: dict[int, Any] = {}
    for number in range(arguments.rounds + 1):  # the first one warms up
        for kind, forms in kinds.items():
            wanted = options(arguments.batch, arguments.max_tokens, forms)
            began = time.perf_counter()
            answers = llm.generate(prompts, wanted, progress=False)
            took_s = time.perf_counter() - began
            tokens = [answer.outputs[0].token_ids for answer in answers]
            if kind == "unconstrained":
                free = dict(enumerate(tokens))
            elif kind == "mixed":
                alone = [free[place] == tokens[place] for place in range(0, arguments.batch, 2)]
                assert all(alone), "an unconstrained request got other tokens than alone"
            if number:
                rates[kind].append(sum(map(len, tokens)) / took_s)
    ratios = {
        kind: statistics.median(a / b for a, b in zip(rates[kind], rates["unconstrained"], strict=True))
        for kind in kinds
        if kind != "unconstrained"
    }
    shape = {"batch": arguments.batch, "max_tokens": arguments.max_tokens, "rounds": arguments.rounds}
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    report = {"bench": "structured_output", **shape, "tokens_per_s": medians, "ratio": ratios, **describe_run()}
    print_report(report, as_json=arguments.json)


if __name__ == "__main__":
    main()
