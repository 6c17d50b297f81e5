"""What the machine gives: open files, shared memory, folders, disk, clock."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from coppice_cli.doctor.findings import Finding, State, fail, ok, warn

FILES_FEW = 4096  # connections of clients are files
FILES_LEAST = 512  # that the processes of a stack need for themselves
SHARED_MEMORY = Path("/dev/shm")  # nosec B108 # looked at, never written to
SHARED_MEMORY_LEAST = 64 << 20  # what Docker gives; counters of front doors lie there
SHARED_MEMORY_OF_RANKS = 1 << 30  # that GPUs which share a model talk through
DISK_FEW = 5 << 30
DISK_LEAST = 256 << 20
MONOTONIC_LOOK_S = 0.01
FIRST_YEAR = 2025

_GIB, _MIB = 1 << 30, 1 << 20


def check_files(limits: Callable[[], tuple[int, int]] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)) -> Finding:
    """Services raise the soft limit to the hard one, so that one counts."""
    _, hard = limits()
    subject = "open files"
    if hard == resource.RLIM_INFINITY:
        return ok(subject, "no limit")
    to_do = "raise the hard limit: ulimit -Hn 65536, LimitNOFILE= of systemd, --ulimit nofile= of docker"
    if hard < FILES_LEAST:
        return fail(subject, f"at most {hard} of a process", to_do)
    if hard < FILES_FEW:
        return warn(subject, f"at most {hard} of a process, and each connection of a client is one", to_do)
    return ok(subject, f"at most {hard} of a process")


def check_shared_memory(folder: Path = SHARED_MEMORY) -> Finding:
    subject = str(folder)
    if not folder.is_dir():
        return warn(subject, "is not there; counters of front doors lie on disk", "mount a tmpfs there")
    room = shutil.disk_usage(folder).free
    more = "give more: --shm-size=8g of docker, an emptyDir of medium Memory on Kubernetes"
    if room < SHARED_MEMORY_LEAST // 2:
        return fail(subject, f"{room // _MIB} MiB are free", more)
    if room < SHARED_MEMORY_OF_RANKS:
        return warn(subject, f"{room // _MIB} MiB are free; --tensor-parallel over GPUs needs 1 GiB", more)
    return ok(subject, f"{room / _GIB:.1f} GiB are free")


def folders_of(log_dir: Path | None) -> dict[str, Path]:
    """What a stack writes to, by what it is for."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {
        "temporary files": Path(tempfile.gettempdir()),
        "compiled kernels": cache / "coppice",
        "models of the hub": Path(os.environ.get("HF_HOME") or cache / "huggingface"),
        "kernels of Triton": Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton"),
        **({} if log_dir is None else {"logs": log_dir}),
    }


def check_folders(folders: dict[str, Path]) -> Iterable[Finding]:
    """Whether each, or what it would be made in, can be written to and has room."""
    for what, folder in folders.items():
        subject = f"folder of {what}"
        there = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            where = f"{there} cannot be written to" if there.is_dir() else f"{there} is no folder"
            yield fail(subject, where, f"chown or chmod it, or choose another folder than {folder}")
            continue
        free = shutil.disk_usage(there).free
        if free < DISK_LEAST:
            yield fail(subject, f"{folder}: {free // _MIB} MiB of disk are free", "make room there")
        elif free < DISK_FEW:
            yield warn(subject, f"{folder}: {free / _GIB:.1f} GiB of disk are free", "a model of the hub may not fit")
        else:
            yield ok(subject, f"{folder}: {free / _GIB:.0f} GiB free")


def check_disk(folder: Path, needed_bytes: int) -> Iterable[Finding]:
    """Whether workers can keep blocks there, and whether there is room for all of them."""
    subject = "folder of the disk tier"
    if not folder.exists():
        yield fail(subject, f"{folder} is not there", "mount the disk, or make the folder")
        return
    for finding in check_folders({"the disk tier": folder}):
        if finding.state is State.FAIL:
            yield finding
            return
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.fsync(file.fileno())
    except OSError as error:
        yield fail(subject, f"{folder}: {error.strerror}", "choose a folder on a local disk")
        return
    free = shutil.disk_usage(folder).free
    said = f"{folder}: {free / _GIB:.1f} GiB are free, {needed_bytes / _GIB:.1f} GiB are asked for"
    if free < needed_bytes:
        yield warn(subject, said, "a smaller --disk-mib; a disk that is full takes no more, which fails nobody")
    else:
        yield ok(subject, said)


def check_clock(
    monotonic: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    look_s: float = MONOTONIC_LOOK_S,
) -> Finding:
    """Leases and deadlines are counted by the monotonic clock, records are dated by the other one."""
    subject, before = "clock", monotonic()
    time.sleep(look_s)
    passed = monotonic() - before
    if passed < look_s / 2:
        return fail(
            subject, f"the monotonic clock went on {passed * 1000:.1f} ms in {look_s * 1000:.0f} ms", "see the host"
        )
    year = time.gmtime(wall()).tm_year
    if year < FIRST_YEAR:
        return fail(subject, f"it is {year} here", "set the clock: certificates and records go by it")
    return ok(subject, f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(wall()))} UTC, and it goes on")
