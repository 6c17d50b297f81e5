"""The tenants file while services run: a newer one counts as a whole, or not at all.

mtime, size or inode differ, and lie still --> read, parse, validate --> apply --> it counts
                                                             wrong --> the old one counts; `problem` says line and key
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from coppice.audit_log import Act, AuditLog
from coppice.errors import UsageError
from coppice.tenants.changes import changes_between
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.file import read_tenants

_log = logging.getLogger("coppice.tenants")
LOOK_S = 1.0  # how often a service should look


class TenantsWatch(Collector):
    """One thread looks; any may read what counts, and any may collect metrics. Raises UsageError when it is made.

    `audit` hears which tenants and keys each file brought and took, and of files that were refused.
    """

    def __init__(self, path: str | Path, audit: AuditLog | None = None) -> None:
        self.path = Path(path)
        self._audit = audit
        self._seen = self._last = _identity(self.path)  # of what was read, and of the last look
        self.content = read_tenants(self.path)
        self.directory = TenantDirectory.parse(self.path, self.content)
        self.problem = ""  # what is wrong with the newest file; empty when it counts
        self.num_errors = 0
        self._tell(TenantDirectory(()), self.directory)

    def look(self, apply: Callable[[TenantDirectory, bytes], None], *, always: bool = False) -> None:
        """Read the file if it changed and was the same at the last look, or `always`.

        It must lie still, as half a file may look like a whole one with fewer tenants. `apply` takes what was found to
        be right, and its bytes; it may refuse it with UsageError, and then has done nothing.
        """
        identity, last = _identity(self.path), self._last
        self._last = identity
        if not always and (identity == self._seen or identity != last):
            return
        self._seen = identity
        try:
            content = read_tenants(self.path)
            if content != self.content:
                directory = TenantDirectory.parse(self.path, content)
                apply(directory, content)
                before, self.content, self.directory = self.directory, content, directory
                self._tell(before, directory)
                _log.info("tenants file %s: version %s counts from now on", self.path, directory.version)
            self.problem = ""
        except UsageError as error:
            self.num_errors += 1
            self.problem = error.line()
            _log.error("the tenants file is refused, version %s counts on: %s", self.directory.version, self.problem)
            self._tell_refused()

    def _tell(self, before: TenantDirectory, after: TenantDirectory) -> None:
        if self._audit is None:
            return
        changes = changes_between(before, after)
        act = self._act()
        act.note(version=after.version, version_before=before.version, count=changes.count, **asdict(changes))
        self._audit.ended(act, done=True)

    def _tell_refused(self) -> None:
        if self._audit is not None:
            act = self._act()
            act.note(version_before=self.directory.version, problem=self.problem)
            self._audit.ended(act, done=False)

    def _act(self) -> Act:
        return Act("tenants", str(self.path), "file")

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for an operator who asks whether the service is ready."""
        version = f"tenants file: version {self.directory.version}"
        return (version, f"a newer tenants file is refused: {self.problem}") if self.problem else (version,)

    def collect(self) -> Iterable[Metric]:
        version = GaugeMetricFamily(
            "coppice_tenants_file", "1, by the version of the tenants file that counts.", labels=["version"]
        )
        version.add_metric([self.directory.version], 1)
        yield version
        refused = "1 while a newer tenants file is refused."
        yield GaugeMetricFamily("coppice_tenants_file_refused", refused, value=int(bool(self.problem)))
        errors = "Times that a tenants file was refused."
        yield CounterMetricFamily("coppice_tenants_file_errors", errors, value=self.num_errors)


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
