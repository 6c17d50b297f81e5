"""Settings of a process: a frozen model, read once in `__main__` from flags and environment; flags win.

    class CacheSettings(Settings):
        env_prefix = "COPPICE_CACHE_"

        http_port: int = Field(8081, ge=0, le=65535, description="Port of the admin HTTP server.")
        seal_key: Annotated[SecretStr, EnvOnly("COPPICE_SEAL_KEY")] = Field(SecretStr(""), description="Hex key.")

    settings = read_settings(CacheSettings, sys.argv[1:], os.environ, "python -m coppice_cache")

A field `http_port` is the flag `--http-port` and the variable `COPPICE_CACHE_HTTP_PORT`. A flag or a variable under the
prefix that no field answers to is an error which names the nearest one that exists, because a setting that is silently
ignored is found only in production. Lists are given with commas: `--workers a:1,b:2`. A secret may lie in a file:
`COPPICE_SEAL_KEY_FILE` names it, so that the key is in no process's environment.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from coppice.addresses import parse_session_address
from coppice.errors import EXIT_OK, EXIT_USAGE, UsageError


@dataclass(frozen=True, slots=True)
class Variable:
    """Marks a field (in `Annotated`) whose variable has this name in all services."""

    variable: str


@dataclass(frozen=True, slots=True)
class EnvOnly(Variable):
    """Marks a field that comes from that variable and has no flag: flags show in process lists."""


def _checked_address(text: str) -> str:
    try:
        parse_session_address(text)
    except UsageError as error:
        raise ValueError(error.line()) from None
    return text


SessionAddressText = Annotated[str, AfterValidator(_checked_address)]
"""HOST:PORT or unix:/PATH, as `coppice.addresses.parse_session_address` reads it."""


class Settings(BaseModel):
    """Base of every service's settings. Subclasses name `env_prefix`, such as `COPPICE_CACHE_`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)
    env_prefix: ClassVar[str] = ""


S = TypeVar("S", bound=Settings)


def read_settings(cls: type[S], argv: Sequence[str], environ: Mapping[str, str], prog: str) -> S:
    """Read `cls` from flags and environment, or end the process: 2 with a clean message, 0 after `--help`.

    Raises SystemExit only; `parse_settings` is the same with a typed error.
    """
    try:
        return parse_settings(cls, argv, environ, prog)
    except UsageError as error:
        print(f"{prog}: {error.line()}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None


def parse_settings(cls: type[S], argv: Sequence[str], environ: Mapping[str, str], prog: str) -> S:
    """Read `cls` from flags (they win) and environment. Raises UsageError; SystemExit(0) after `--help`."""
    from_flags = _flag_values(cls, argv, prog)
    from_environment = _environment_values(cls, environ)
    merged = {**from_environment, **from_flags}
    values = {name: _split_if_list(cls.model_fields[name], value) for name, value in merged.items()}
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise UsageError(_explain(cls, error, set(from_flags)), hint=f"see {prog} --help") from None


def flag_of(field_name: str) -> str:
    """The flag of a field: `http_port` is `--http-port`."""
    return "--" + field_name.replace("_", "-")


def variable_of(cls: type[Settings], field_name: str) -> str:
    """The environment variable of a field."""
    for mark in cls.model_fields[field_name].metadata:
        if isinstance(mark, Variable):
            return mark.variable
    return cls.env_prefix + field_name.upper()


def nearest(word: str, known: Iterable[str]) -> str:
    """A half sentence that names the known word nearest to a mistyped one, or lists all when none is near."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"


def refuse_unknown_variables(prefix: str, known: Iterable[str], environ: Mapping[str, str]) -> None:
    """Raise UsageError when a variable under `prefix` is none of `known`."""
    names = set(known)
    for variable in sorted(environ):
        if variable.startswith(prefix) and variable not in names:
            raise UsageError(f"unknown environment variable {variable}", hint=nearest(variable, names))


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing usage and leaving; the caller decides how a person hears of it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see {self.prog} --help")

    def exit(self, status: int = EXIT_OK, message: str | None = None) -> NoReturn:
        raise SystemExit(status)


def _flag_values(cls: type[Settings], argv: Sequence[str], prog: str) -> dict[str, Any]:
    parser = _Parser(
        prog=prog,
        description=(cls.__doc__ or "").strip(),
        allow_abbrev=False,
        epilog=f"Every flag can also be set as {cls.env_prefix}NAME in the environment; a flag wins.",
    )
    flags: list[str] = ["--help"]
    for name, field in cls.model_fields.items():
        if not _has_flag(cls, name):
            continue
        flags.append(flag_of(name))
        _add_flag(parser, name, field)
    parsed, unknown = parser.parse_known_args(list(argv))
    for word in unknown:
        if word.startswith("-"):
            flag = word.split("=", 1)[0]
            raise UsageError(f"unknown flag {flag}", hint=nearest(flag, flags))
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}", hint=f"see {prog} --help")
    return vars(parsed)


def _add_flag(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    text = (field.description or "").replace("%", "%%")
    if not field.is_required() and not _is_empty(field.default):
        shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
        text += f" [default: {shown}]"
    core = _without_none(field.annotation)
    if core is bool:
        parser.add_argument(
            flag_of(name), dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
        return
    metavar = "|".join(map(str, get_args(core))) if get_origin(core) is Literal else name.rsplit("_", 1)[-1].upper()
    parser.add_argument(flag_of(name), dest=name, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _is_empty(default: object) -> bool:
    return default is None or default in ("", ()) or isinstance(default, SecretStr)


SECRET_BYTES_MAX = 4096
IN_FILE = "_FILE"


def _environment_values(cls: type[Settings], environ: Mapping[str, str]) -> dict[str, Any]:
    variables = {variable_of(cls, name): name for name in cls.model_fields}
    secrets = {variable: name for variable, name in variables.items() if not _has_flag(cls, name)}
    if cls.env_prefix:
        refuse_unknown_variables(cls.env_prefix, {*variables, *(secret + IN_FILE for secret in secrets)}, environ)
    values: dict[str, Any] = {name: environ[variable] for variable, name in variables.items() if variable in environ}
    for variable, name in secrets.items():
        if variable + IN_FILE in environ:
            if name in values:
                raise UsageError(f"{variable} and {variable}{IN_FILE} are both set", hint="give one of them")
            values[name] = _secret_in(variable + IN_FILE, Path(environ[variable + IN_FILE]))
    return values


def _has_flag(cls: type[Settings], field_name: str) -> bool:
    return not any(isinstance(mark, EnvOnly) for mark in cls.model_fields[field_name].metadata)


def _secret_in(variable: str, path: Path) -> str:
    """Of the file that `variable` names; its last line end does not count. Raises UsageError."""
    try:
        with path.open("rb") as file:
            content = file.read(SECRET_BYTES_MAX + 1)
        text = content.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise UsageError(f"{variable}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{variable}: {path} is no text") from error
    if not text or len(content) > SECRET_BYTES_MAX:
        raise UsageError(f"{variable}: {path} must have 1 to {SECRET_BYTES_MAX} bytes")
    return text


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        return rest[0] if len(rest) == 1 else annotation
    return annotation


def _split_if_list(field: FieldInfo, value: Any) -> Any:
    if get_origin(_without_none(field.annotation)) in (tuple, list, frozenset) and isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _explain(cls: type[Settings], error: ValidationError, names_from_flags: set[str]) -> str:
    """Say per field which flag or variable is wrong and why, in the order of the model."""
    parts = []
    for problem in error.errors(include_url=False, include_context=False):
        if not problem["loc"]:
            parts.append(problem["msg"].removeprefix("Value error, "))
            continue
        name = str(problem["loc"][0])
        has_flag = _has_flag(cls, name)
        if problem["type"] == "missing":
            variable = variable_of(cls, name)
            parts.append(f"{flag_of(name)} (or {variable}) is required" if has_flag else f"{variable} is required")
            continue
        where = flag_of(name) if name in names_from_flags else variable_of(cls, name)
        message = problem["msg"].removeprefix("Value error, ")
        parts.append(f"{where}: {message[:1].lower()}{message[1:]}")
    return "; ".join(parts)
