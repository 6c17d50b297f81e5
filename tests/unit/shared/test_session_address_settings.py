"""Addresses of sessions among the settings of each service: both forms, and what is said of others."""

from __future__ import annotations

import pytest

from coppice.errors import UsageError
from coppice.settings import Settings, parse_settings
from coppice_cache.edge.settings import CacheSettings
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_worker.edge.settings import WorkerSettings

FLAGS: list[tuple[type[Settings], str]] = [
    (CacheSettings, "session_address"),
    (WorkerSettings, "cache"),
    (WorkerSettings, "session_address"),
    (WorkerSettings, "advertise"),
    (ServiceSettings, "cache"),
]
NAMES = [f"{settings.__name__} {name}" for settings, name in FLAGS]


def parsed(settings: type[Settings], name: str, value: str) -> Settings:
    model = [] if settings is CacheSettings else ["--model", "m"]
    return parse_settings(settings, [*model, f"--{name.replace('_', '-')}", value], {}, "prog")


@pytest.mark.parametrize(("settings", "name"), FLAGS, ids=NAMES)
def test_both_forms_are_taken_and_help_says_so(
    settings: type[Settings], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("cache:7081", "[::1]:7081", "unix:/run/coppice/cache"):
        assert getattr(parsed(settings, name, value), name) == value
    with pytest.raises(SystemExit):
        parse_settings(settings, ["--help"], {}, "prog")
    listed = " ".join(capsys.readouterr().out.split())
    assert f"--{name.replace('_', '-')} {name.rpartition('_')[2].upper()} HOST:PORT or unix:/PATH" in listed


@pytest.mark.parametrize(("settings", "name"), FLAGS, ids=NAMES)
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("7081", "'7081' is no address (give HOST:PORT or unix:/PATH)"),
        ("unix:cache", "'unix:cache' names no absolute path (give unix:/PATH)"),
        (f"unix:/{'s' * 200}", "the path has 201 bytes"),
    ],
)
def test_another_form_is_refused_with_its_flag(settings: type[Settings], name: str, value: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed(settings, name, value)
    assert f"--{name.replace('_', '-')}: " in refused.value.line()
    assert why in refused.value.line()
