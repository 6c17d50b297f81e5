"""`coppice bench smoke`: against a running stack, or one of its own that it stops again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rich.console import Console

from coppice.errors import EXIT_FAILURE, EXIT_OK
from coppice.versions import describe_machine
from coppice_bench.serve.smoke import SmokeResult, measure
from coppice_up.display import display_for
from coppice_up.options import UpOptions
from coppice_up.stack import StopRequested, running_stack
from coppice_up.supervisor import TICK_S, Supervisor


def run_smoke(*, url: str, api_key: str, as_json: bool, options: UpOptions) -> int:
    """Measure, print, return the exit code. Progress goes to stderr, so that stdout is the result alone."""
    if url:
        result = asyncio.run(measure(url, api_key))
    else:
        display = display_for(Console(stderr=True))
        try:
            with running_stack(options, display) as (plan, supervisor):
                display.note("measuring")
                result = asyncio.run(_measure_while_tending(plan.rest_url, api_key, supervisor))
        except StopRequested:
            display.note("stopped before the measurement ended")
            return EXIT_FAILURE
    report = {**result.as_dict(), "stack": _describe_stack(url, options), **describe_machine()}
    print(json.dumps(report) if as_json else _as_text(result), flush=True)
    return EXIT_OK


async def _measure_while_tending(url: str, api_key: str, supervisor: Supervisor) -> SmokeResult:
    """A signal or a dead child ends the measurement at once. Raises StopRequested, ChildFailed."""
    measuring = asyncio.create_task(measure(url, api_key))
    try:
        while not measuring.done():
            if supervisor.stop_requested:
                raise StopRequested
            supervisor.tick()
            await asyncio.wait([measuring], timeout=TICK_S)
        return measuring.result()
    finally:
        measuring.cancel()


def _describe_stack(url: str, options: UpOptions) -> dict[str, Any]:
    if url:
        return {"url": url}
    return {"workers": options.workers, "device": options.device, "dtype": options.dtype, "block": options.block_size}


def _as_text(result: SmokeResult) -> str:
    return "\n".join(f"{name:20} {value}" for name, value in result.as_dict().items())
