"""What `make` runs before anything is installed, over a pip that notes what it is asked and answers from a table."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.pip_plan import Package, Plan, check_room, read_report
from scripts.pip_runs import Failed, Meter, hint
from scripts.set_up import Environment, Wish, locked_version, main, say_missing_compiler, say_plan, wanted_digest

ROOT = Path(__file__).resolve().parents[3]
PIP_VERSION = locked_version(ROOT, "pip")
TORCH = locked_version(ROOT, "torch")
PIP = """#!/bin/sh
# Stands in for .venv/bin/python: notes what pip is asked for; what it answers lies in $folder.
folder={folder}
echo "$*" >> $folder/asked
previous=
case "$*" in
  *--dry-run*+cpu*) test -e $folder/has_cpu || exit 1;;
  *--torch-backend*) test -e $folder/cpu_index || exit 1; . $folder/cpu_index; exit 0;;
esac
for argument; do
  test "$previous" = --report && cp $folder/report.json "$argument" && exit 0
  previous=$argument
done
test -e $folder/interrupt && kill -INT $PPID && sleep 5
test -e $folder/fails && cat $folder/fails && exit 1
exit 0
"""


class Stand:
    """A project folder with a .venv of such a pip."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.answers = root / "answers"
        self.answers.mkdir()
        for file in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / file, root)
        self.environment = Environment(root)
        self.environment.python.parent.mkdir(parents=True)
        version = ".".join(map(str, sys.version_info[:3]))
        (self.environment.folder / "pyvenv.cfg").write_text(f"version = {version}\n")
        self.environment.python.write_text(PIP.format(folder=self.answers))
        self.environment.python.chmod(0o755)
        self.install(f"pip-{PIP_VERSION}")
        self.offer(f"torch-{TORCH}+cpu")

    def install(self, name: str) -> None:
        folder = self.environment.site_packages() / f"{name}.dist-info"
        folder.mkdir(parents=True)
        (folder / "RECORD").touch()

    def offer(self, *files: str) -> None:
        """What pip says that it would install: each a file of 1 MB."""
        entries = []
        for file in files:
            wheel = self.answers / f"{file}-py3-none-any.whl"
            wheel.write_bytes(b"\0" * 1_000_000)
            name, version = file.rsplit("-", 1)
            entries.append({"metadata": {"name": name, "version": version}, "download_info": {"url": wheel.as_uri()}})
        project = {"metadata": {"name": "coppice", "version": "1"}, "download_info": {"url": "x", "dir_info": {}}}
        (self.answers / "report.json").write_text(json.dumps({"install": [*entries, project]}))

    def set_up(self, *arguments: str) -> int:
        return main(list(arguments), self.root)

    def asked(self) -> list[str]:
        asked = self.answers / "asked"
        return asked.read_text().splitlines() if asked.exists() else []


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    """On a machine without a GPU."""
    (tmp_path / "tools").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:/usr/bin:/bin")
    if shutil.which("nvidia-smi"):
        pytest.skip("nvidia-smi is where no test can hide it")
    return Stand(tmp_path)


def put_nvidia_smi(stand: Stand) -> None:
    file = stand.root / "tools" / "nvidia-smi"
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)


def test_what_was_planned_is_installed_and_the_second_time_nothing_is_done(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stand.set_up("dev") == 0
    *_, planned, installed = stand.asked()
    assert "--dry-run" in planned
    assert f"--editable {stand.root}[dev]" in planned
    assert "--no-deps" in installed
    assert installed.endswith(f"--editable {stand.root}[dev] torch=={TORCH}+cpu")
    assert "1 package to download: 1 MB." in capsys.readouterr().err
    num_asked = len(stand.asked())
    assert stand.set_up("dev") == stand.set_up("up") == 0  # the tests' tools come with what serving needs
    assert len(stand.asked()) == num_asked
    assert not capsys.readouterr().err


def test_serving_comes_first_and_the_tests_add_to_it(stand: Stand) -> None:
    assert stand.set_up("up") == 0
    assert not any("[dev]" in line for line in stand.asked())
    assert stand.set_up("dev") == 0
    assert "[dev]" in stand.asked()[-1]


def test_without_a_gpu_a_cpu_build_is_asked_for_by_name(stand: Stand) -> None:
    (stand.answers / "has_cpu").touch()
    assert stand.set_up("up") == 0
    planned = [line for line in stand.asked() if "--dry-run" in line and "--editable" in line]
    assert len(planned) == 1
    assert f" torch=={TORCH}+cpu " in planned[0]


def test_without_a_gpu_and_a_cpu_build_of_pips_it_comes_from_pytorchs_index(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    folder = stand.environment.site_packages() / f"torch-{TORCH}+cpu.dist-info"
    (stand.answers / "cpu_index").write_text(f"mkdir -p {folder}; touch {folder}/RECORD\n")
    assert stand.set_up("up") == 0
    assert "from PyTorch's own index, about 200 MB" in capsys.readouterr().err
    assert [line for line in stand.asked() if "--torch-backend cpu --no-deps torch==" in line]
    assert stand.environment.has("torch", TORCH)


def test_where_pytorchs_index_does_not_answer_pip_goes_on_with_what_it_finds(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    stand.offer(f"torch-{TORCH}", "nvidia-nccl-1")
    assert stand.set_up("up") == 0
    told = capsys.readouterr().err
    assert told.index("does not answer; now for what pip finds") < told.index("a build for CUDA")


def test_other_machines_find_a_cpu_build_in_the_usual_index(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert stand.set_up("up") == 0
    asked = [line.split() for line in stand.asked()]
    assert not [words for words in asked if "uv" in words or any(word.startswith("uv==") for word in words)]


def test_a_cuda_build_without_a_gpu_is_told_of_with_its_size_before_it_comes(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    stand.offer(f"torch-{TORCH}", "nvidia_cublas-13.1", "rich-15.0.0")
    assert stand.set_up("up") == 0
    told = capsys.readouterr().err
    assert "a build for CUDA, and there is no GPU here (no nvidia-smi)" in told
    assert "TORCH_PIP_ARGS" in told
    assert "3 packages to download: 3 MB." in told


def test_with_a_gpu_no_cpu_build_is_asked_for_and_one_that_comes_is_told_of(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    put_nvidia_smi(stand)
    (stand.answers / "has_cpu").touch()
    assert stand.set_up("up") == 0
    assert not any("+cpu" in line for line in stand.asked() if "--dry-run" in line)
    assert "a build for CPUs, though there is a GPU here" in capsys.readouterr().err


def test_torch_alone_gets_its_arguments_and_new_ones_make_all_anew(stand: Stand) -> None:
    assert stand.set_up("up", "--torch-arguments", "--index-url somewhere") == 0
    with_arguments = [line for line in stand.asked() if "--index-url somewhere" in line]
    assert len(with_arguments) == 2  # planned, installed
    assert all("--no-deps" in line and "--editable" not in line for line in with_arguments)
    kind = Wish("up", python_is_given=False, torch_arguments="--index-url elsewhere")
    assert stand.environment.fault(kind) == "has a torch of other TORCH_PIP_ARGS"
    assert stand.set_up("up") == 0  # whoever says nothing keeps what is there


def test_what_pip_says_is_shown_when_it_fails_and_the_next_run_tries_again(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    (stand.answers / "fails").write_text("OSError: [Errno 28] No space left on device\n")
    assert stand.set_up("up") == 1
    told = capsys.readouterr().err
    assert "OSError: [Errno 28]" in told
    assert told.splitlines()[-1] == "make: The disk is full: make room, then run the same command again."
    (stand.answers / "fails").unlink()
    assert stand.set_up("up") == 0


def test_ctrl_c_ends_with_130_and_a_word(stand: Stand) -> None:
    (stand.answers / "interrupt").touch()
    code = "import sys, pathlib, scripts.set_up as it; sys.exit(it.main(['up'], pathlib.Path(sys.argv[1])))"
    ended = subprocess.run([sys.executable, "-c", code, stand.root], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 128 + signal.SIGINT
    assert ended.stderr.endswith("Stopped. The same command goes on from here.\n")
    assert "Traceback" not in ended.stderr


def test_what_an_interrupted_pip_left_is_installed_again(stand: Stand) -> None:
    stand.install("rich-15.0.0")
    site = stand.environment.site_packages()
    (site / "numpy-2.4.6.dist-info").mkdir()
    (site / "~umpy").mkdir()
    stand.environment.forget_half_installed()
    assert sorted(folder.name for folder in site.iterdir()) == [f"pip-{PIP_VERSION}.dist-info", "rich-15.0.0.dist-info"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda stand: (stand.environment.folder / "pyvenv.cfg").unlink(), "is incomplete"),
        (lambda stand: stand.environment.python.unlink(), "has lost its Python"),
        (lambda stand: stand.environment.write_note(folder="elsewhere"), "was moved here"),
        (lambda stand: (stand.environment.folder / "pyvenv.cfg").write_text("version = 3.10.1\n"), "has Python 3.10"),
    ],
)
def test_an_environment_that_will_not_do_is_known(stand: Stand, change: object, fault: str) -> None:
    wish = Wish("up", python_is_given=False, torch_arguments="")
    assert stand.environment.fault(wish) is None
    assert callable(change)
    change(stand)
    assert stand.environment.fault(wish) == fault


def test_another_python_does_unless_one_was_given(stand: Stand) -> None:
    (stand.environment.folder / "pyvenv.cfg").write_text("version_info = 3.99.0\n")
    assert stand.environment.fault(Wish("up", python_is_given=False, torch_arguments="")) is None
    fault = stand.environment.fault(Wish("up", python_is_given=True, torch_arguments=""))
    assert fault == f"has Python 3.99, not {sys.version_info[0]}.{sys.version_info[1]}"


def test_what_a_link_leads_to_is_not_removed(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    stand.environment.write_note(folder="elsewhere")
    elsewhere = stand.environment.folder.rename(stand.environment.folder.with_name("another's"))
    stand.environment.folder.symlink_to(elsewhere)
    assert stand.set_up("up") == 1
    assert capsys.readouterr().err.endswith(f"it is a link to {elsewhere}: remove the link.\n")
    assert (elsewhere / "bin" / "python").exists()


def test_an_environment_that_something_else_made_is_not_removed(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    (stand.environment.folder / "pyvenv.cfg").write_text("version = 3.10.1\n")
    assert stand.set_up("up") == 1
    assert capsys.readouterr().err.endswith("something else made it: move it away or remove it.\n")
    assert stand.environment.python.exists()


def test_only_what_is_installed_counts_as_a_change(stand: Stand) -> None:
    before = wanted_digest(stand.root)
    project = stand.root / "pyproject.toml"
    project.write_text(project.read_text().replace("line-length = 120", "line-length = 100"))
    assert wanted_digest(stand.root) == before
    project.write_text(project.read_text().replace('"rich>=15,<16"', '"rich>=15,<17"'))
    assert wanted_digest(stand.root) != before


def test_sizes_that_no_index_tells_are_not_invented(tmp_path: Path) -> None:
    url = (tmp_path / "gone-1.0-py3-none-any.whl").as_uri()
    entry = {"metadata": {"name": "Gone_One", "version": "1.0"}, "download_info": {"url": url}}
    plan = read_report(json.dumps({"install": [entry]}))
    assert plan.packages == [Package("gone-one", "1.0", "gone-1.0-py3-none-any.whl", None)]
    assert "does not say how large" in plan.text()


@pytest.mark.parametrize(("has_gpu", "word"), [(False, "apt-get install g++"), (True, "apt-get install gcc")])
def test_a_missing_compiler_is_told_of(
    has_gpu: bool, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    say_missing_compiler(has_gpu)
    assert word in capsys.readouterr().err


def test_too_little_room_is_told_before_anything_comes() -> None:
    plan = Plan([Package("torch", "2.13.0", "torch.whl", 2_000_000_000)])
    check_room(plan, free_bytes=4_000_000_000)
    with pytest.raises(Failed, match=r"3\.4 GB are needed in this folder, 3\.0 GB are free"):
        check_room(plan, free_bytes=3_000_000_000)


def test_nothing_new_is_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    say_plan(Plan([]), has_gpu=False)
    assert not capsys.readouterr().err


def test_the_meter_follows_pip() -> None:
    installed = 3
    meter = Meter("installing", {"a-1.whl": 3_000_000, "b-2.whl": 7_000_000}, lambda: installed)
    assert meter.text() == "installing"
    for line, text in (
        ("  Downloading a-1.whl (3.0 MB)\n", "installing: 1 MB of 10 MB, a"),
        ("Progress 2000000 of 3000000\n", "installing: 2 MB of 10 MB, a"),
        ("  Using cached b-2.whl (7.0 MB)\n", "installing: 3 MB of 10 MB, b"),
        ("Progress 4000000 of 7000000\n", "installing: 7 MB of 10 MB, b"),
        ("  Downloading hatchling-1.whl (1.0 MB)\n", "installing: 10 MB of 10 MB"),
        ("Progress 500000 of 1000000\n", "installing: 10 MB of 10 MB"),
        ("Installing collected packages: a, b\n", "installing: 0 of 2 packages are unpacked"),
    ):
        meter.hear(line)
        assert meter.text() == text
    installed = 4
    assert meter.text() == "installing: 1 of 2 packages are unpacked"


@pytest.mark.parametrize(
    ("output", "word"),
    [
        ("NameResolutionError(...)\nERROR: No matching distribution found for pip", "HTTPS_PROXY"),
        ("ERROR: ResolutionImpossible: for help visit", "make lock"),
        ("ERROR: No matching distribution found for torch==2.13.0", "PYTHON="),
        ("error: command 'gcc' failed: No such file or directory", "build-essential"),
        ("SSLError(SSLCertVerificationError(1, 'certificate verify failed'))", "PIP_CERT"),
        ("something that nobody foresaw", "removed and made again"),
    ],
)
def test_what_fails_says_what_to_do(output: str, word: str) -> None:
    assert word in hint(output)
    assert "\n" not in hint(output)


@pytest.mark.parametrize("python", ["no-such-python", "false"])
def test_make_without_a_python_says_which_it_needs(python: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed here")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "venv-up", f"PYTHON={python}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 2
    assert "make: Python 3.11 or newer is needed" in ended.stderr
