"""What pip would install, and how large it is, before any of it is fetched."""

from __future__ import annotations

import json
import os
import ssl
import tempfile
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts.pip_runs import Failed, Meter, pip, run, size_text

HEAD_TIMEOUT_S = 10.0
HEADS_AT_ONCE = 16
CUDA_NAMES = ("nvidia-", "cuda-", "triton", "torch")
# Wheels are compressed. With CUDA they take 1.7 times as much when they are unpacked, without it more.
UNPACKED_PER_BYTE = 1.7


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    version: str
    file: str
    num_bytes: int | None  # None: the index did not say


@dataclass(frozen=True, slots=True)
class Plan:
    packages: list[Package]

    @property
    def num_bytes(self) -> int:
        return sum(package.num_bytes or 0 for package in self.packages)

    @property
    def torch(self) -> Package | None:
        return next((package for package in self.packages if package.name == "torch"), None)

    @property
    def has_cuda(self) -> bool:
        return any(package.name.startswith("nvidia-") for package in self.packages)

    @property
    def cuda_bytes(self) -> int:
        return sum(package.num_bytes or 0 for package in self.packages if package.name.startswith(CUDA_NAMES))

    @property
    def sizes(self) -> dict[str, int]:
        return {package.file: package.num_bytes or 0 for package in self.packages}

    def text(self) -> str:
        packages = "1 package" if len(self.packages) == 1 else f"{len(self.packages)} packages"
        unknown = sum(package.num_bytes is None for package in self.packages)
        if unknown == len(self.packages):
            return f"{packages} to download; the index does not say how large"
        more = f" and {unknown} of unknown size" if unknown else ""
        return f"{packages} to download: {size_text(self.num_bytes)}{more}"


def plan(python: Path, requirements: list[str]) -> Plan:
    """What `pip install` would bring for these arguments. Where the index has no metadata, parts of wheels are read."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip(python, _dry_run(report, requirements), Meter("asking the package index", {}))
        return read_report(report.read_text(encoding="utf-8"))


def is_offered(python: Path, requirements: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        arguments = _dry_run(Path(folder) / "report.json", requirements)
        return run([str(python), "-m", "pip", *arguments], Meter("looking for a CPU build of PyTorch", {}))[0] == 0


def _dry_run(report: Path, requirements: list[str]) -> list[str]:
    return ["install", "--dry-run", "--use-feature", "fast-deps", "--report", str(report), *requirements]


def read_report(text: str) -> Plan:
    entries = [entry for entry in json.loads(text)["install"] if "dir_info" not in entry["download_info"]]
    urls = [entry["download_info"]["url"] for entry in entries]
    with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
        sizes = list(pool.map(num_bytes_of, urls))
    return Plan(
        [
            Package(
                entry["metadata"]["name"].lower().replace("_", "-"),
                entry["metadata"]["version"],
                urllib.parse.unquote(url.rsplit("/", 1)[-1]),
                size,
            )
            for entry, url, size in zip(entries, urls, sizes, strict=True)
        ]
    )


def num_bytes_of(url: str) -> int | None:
    """The size of a file, without fetching it."""
    try:
        if url.startswith("file:"):
            return Path(urllib.request.url2pathname(urllib.parse.urlparse(url).path)).stat().st_size
        trusted = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=HEAD_TIMEOUT_S, context=trusted) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, ValueError, TypeError):
        return None


def check_room(wanted: Plan, free_bytes: int) -> None:
    needed = int(wanted.num_bytes * UNPACKED_PER_BYTE)
    if free_bytes < needed:
        raise Failed(
            f"At least {size_text(needed)} are needed in this folder, {size_text(free_bytes)} are free: make room"
            + (", or name an index with CPU builds of PyTorch (TORCH_PIP_ARGS)." if wanted.has_cuda else ".")
        )
