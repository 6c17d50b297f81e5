"""Settings: flags win over environment, and nothing mistyped is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, SecretStr, ValidationError, model_validator

from coppice.errors import UsageError
from coppice.settings import EnvOnly, Settings, parse_settings, read_settings


class Demo(Settings):
    """Settings of a service that exists only here."""

    env_prefix = "COPPICE_DEMO_"

    host: str = Field("127.0.0.1", description="Address to listen on.")
    http_port: int = Field(8081, ge=0, le=65535, description="Port of the HTTP server.")
    model: Path | None = Field(None, description="Directory of a checkpoint.")
    dtype: Literal["auto", "float32"] = Field("auto", description="How weights are held.")
    peers: tuple[str, ...] = Field((), description="Addresses, with commas.")
    verbose: bool = Field(False, description="Say more.")
    seal_key: Annotated[SecretStr, EnvOnly("COPPICE_SEAL_KEY")] = Field(SecretStr(""), description="Key, as hex.")

    @model_validator(mode="after")
    def _loopback_needs_no_key(self) -> Demo:
        if self.host == "0.0.0.0" and not self.seal_key.get_secret_value():
            raise ValueError("a public host needs COPPICE_SEAL_KEY")
        return self


class Needy(Settings):
    """One required field."""

    env_prefix = "COPPICE_NEEDY_"
    cache: str = Field(description="Address of the cache service.")


def read(*argv: str, **environ: str) -> Demo:
    return parse_settings(Demo, argv, environ, "coppice demo")


def test_defaults_hold_when_nothing_is_said() -> None:
    assert read() == Demo()


def test_flags_win_over_environment() -> None:
    settings = read("--http-port", "9000", COPPICE_DEMO_HTTP_PORT="9001", COPPICE_DEMO_DTYPE="float32")
    assert (settings.http_port, settings.dtype) == (9000, "float32")


def test_values_are_typed() -> None:
    settings = read("--model=some/dir", "--peers", "a:1, b:2", "--verbose")
    assert settings.model == Path("some/dir")
    assert settings.peers == ("a:1", "b:2")
    assert settings.verbose
    assert not read("--no-verbose", COPPICE_DEMO_VERBOSE="1").verbose


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        read().http_port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--htp-port", "1"], {}, ["unknown flag --htp-port", "did you mean --http-port?"]),
        (["--http-prt=1"], {}, ["unknown flag --http-prt", "did you mean --http-port?"]),
        (["--http"], {}, ["unknown flag --http"]),
        (["--zzz", "1"], {}, ["unknown flag --zzz", "known: ", "--dtype"]),
        (["extra"], {}, ["unexpected argument 'extra'"]),
        ([], {"COPPICE_DEMO_HTTP_PROT": "1"}, ["COPPICE_DEMO_HTTP_PROT", "did you mean COPPICE_DEMO_HTTP_PORT?"]),
        (["--http-port", "many"], {}, ["--http-port: input should be a valid integer"]),
        (["--http-port", "70000"], {}, ["--http-port: input should be less than or equal to 65535"]),
        ([], {"COPPICE_DEMO_HTTP_PORT": "-1"}, ["COPPICE_DEMO_HTTP_PORT: input should be greater than or equal to 0"]),
        (["--dtype", "int3"], {}, ["--dtype: input should be 'auto' or 'float32'"]),
        (["--http-port"], {}, ["--http-port", "expected one argument"]),
        (["--host", "0.0.0.0"], {}, ["a public host needs COPPICE_SEAL_KEY"]),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read(*argv, **environ)
    for word in words:
        assert word in caught.value.line()


def test_a_required_field_is_named_with_both_its_names() -> None:
    with pytest.raises(UsageError, match=r"--cache \(or COPPICE_NEEDY_CACHE\) is required"):
        parse_settings(Needy, [], {}, "coppice needy")


def test_variables_of_other_services_are_left_alone() -> None:
    assert read(COPPICE_OTHER_PORT="1", PATH="x") == Demo()


def test_a_secret_has_no_flag_and_is_never_shown() -> None:
    settings = read(COPPICE_SEAL_KEY="abcdef01")
    assert settings.seal_key.get_secret_value() == "abcdef01"
    assert "abcdef01" not in repr(settings)
    with pytest.raises(UsageError, match="unknown flag --seal-key"):
        read("--seal-key", "abcdef01")


def test_a_secret_may_lie_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("abcdef01\n")
    assert read(COPPICE_SEAL_KEY_FILE=str(file)).seal_key.get_secret_value() == "abcdef01"


@pytest.mark.parametrize(
    ("content", "beside", "message"),
    [
        (None, {}, "COPPICE_SEAL_KEY_FILE: cannot read .*key: No such file"),
        (b"", {}, "COPPICE_SEAL_KEY_FILE: .*key must have 1 to 4096 bytes"),
        (b"\n", {}, "must have 1 to 4096 bytes"),
        (b"a" * 4097, {}, "must have 1 to 4096 bytes"),
        (b"\xff", {}, "is no text"),
        (b"ab", {"COPPICE_SEAL_KEY": "ab"}, "COPPICE_SEAL_KEY and COPPICE_SEAL_KEY_FILE are both set"),
    ],
)
def test_a_file_that_holds_no_secret(
    tmp_path: Path, content: bytes | None, beside: dict[str, str], message: str
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read(COPPICE_SEAL_KEY_FILE=str(file), **beside)


def test_only_a_secret_may_lie_in_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown environment variable COPPICE_DEMO_HTTP_PORT_FILE"):
        read(COPPICE_DEMO_HTTP_PORT_FILE=str(tmp_path))


def test_usage_errors_end_the_process_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_settings(Demo, ["--http-port", "x"], {}, "coppice demo")
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("coppice demo: --http-port: ")


def test_help_gives_descriptions_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_settings(Demo, ["--help"], {}, "coppice demo")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Port of the HTTP server. [default: 8081]" in text
    assert "auto|float32" in text
    assert "COPPICE_DEMO_NAME" in text
    assert "seal" not in text
