"""`coppice audit isolation`: look at the server, run the trials, say what came of it."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from coppice.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError
from coppice_audit.core.judge import Verdict, judge, leak_is_certain, verdict_of
from coppice_audit.core.plan import plan_trials, prompts
from coppice_audit.core.samples import Samples
from coppice_audit.measure import Measurement
from coppice_audit.options import AuditOptions
from coppice_audit.plot import write_plot
from coppice_audit.preflight import Target, look
from coppice_audit.report import as_json, lines, write_json
from coppice_audit.server import Completes, Server
from coppice_bench.report import note

INTERRUPTED = "interrupted"
EXIT_LEAK = 3
EXIT_INCONCLUSIVE = 4
_EXITS = {Verdict.ISOLATED: EXIT_OK, Verdict.LEAK: EXIT_LEAK, Verdict.INCONCLUSIVE: EXIT_INCONCLUSIVE}
SEED_BITS = 61
_PROGRESS_S = 5.0
_LOOK_TRIALS = 500  # after so many trials it is asked whether a leak is certain


def run_isolation(options: AuditOptions, *, seed: int | None, json: Path | None, plot: Path | None) -> int:
    """Audit, print, return the exit code: 0 isolated, 3 leak, 4 inconclusive, 130 after Ctrl-C with what there was."""
    options.check()
    for flag, path in (("--json", json), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{flag} {path}: there is no folder {path.parent}")
    seed = secrets.randbits(SEED_BITS) if seed is None else seed
    audit = Audit(options, seed)
    audit.run()
    assert audit.target is not None
    return conclude(options, audit.target, seed, audit.samples, json=json, plot=plot)


def conclude(
    options: AuditOptions, target: Target, seed: int, samples: Samples, *, json: Path | None, plot: Path | None
) -> int:
    """Judge, print, write the files, return the exit code."""
    checks = judge(samples)
    verdict = verdict_of(checks)
    print("\n".join(lines(checks, verdict)), flush=True)
    if json is not None:
        write_json(json, as_json(options, target, seed, samples, checks, verdict))
    if plot is not None:
        write_plot(plot, samples, verdict, target.model)
    return EXIT_INTERRUPTED if samples.stopped == INTERRUPTED else _EXITS[verdict]


class Audit:
    """One audit of one server. `samples` are there after `run`, also when Ctrl-C ended it."""

    def __init__(self, options: AuditOptions, seed: int) -> None:
        self._options = options
        self._seed = seed
        self.target: Target | None = None
        self.samples = Samples()

    def run(self) -> None:
        """Raises CoppiceError when the server cannot be audited, KeyboardInterrupt before the first trial."""
        try:
            asyncio.run(self._run())
        except KeyboardInterrupt:
            if not self.samples.num_trials:
                raise
            note("interrupted; this is what there is")
            self.samples.stopped = INTERRUPTED

    async def _run(self) -> None:
        options = self._options
        server = Server(options.base_url, options.model, options.timeout_s)
        try:
            self.target = await look(server, options, self._seed)
            note(f"{self.target.model}, prompts of {self.target.prompt_tokens} tokens, seed {self._seed}")
            await measure(server, options, self._seed, self.target.num_words, self.samples)
        finally:
            server.close()


async def measure(server: Completes, options: AuditOptions, seed: int, num_words: int, samples: Samples) -> None:
    """Fill `samples`, until all trials are over or a leak is certain."""
    trials = plan_trials(options.samples, seed)
    measurement = Measurement(server, options.victim_key, options.attacker_key, prompts(seed, num_words), seed, samples)
    await measurement.run(trials, _Progress(samples, len(trials)))


@dataclass(slots=True)
class _Progress:
    """A line to stderr now and then, and the end as soon as more trials would change nothing."""

    samples: Samples
    num_trials: int
    _began_s: float = field(default_factory=time.monotonic)
    _told_s: float = field(default_factory=time.monotonic)

    def __call__(self, done: int) -> bool:
        now_s = time.monotonic()
        if now_s - self._told_s >= _PROGRESS_S:
            self._told_s = now_s
            spent_s = now_s - self._began_s
            failed = f", {self.samples.failures.total()} failed" if self.samples.failures else ""
            left_s = spent_s / done * (self.num_trials - done)
            note(f"{spent_s:6.0f} s  {done} of {self.num_trials} trials{failed}, some {left_s:.0f} s left")
        return done % _LOOK_TRIALS == 0 and leak_is_certain(judge(self.samples))
