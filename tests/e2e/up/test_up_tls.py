"""`coppice up` with a certificate for clients."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from typer.testing import CliRunner

from coppice_cli.app import app
from tests.e2e.up.test_up import ctrl_c_leaves_nothing_running, started
from tests.fakes.certificates import Authority

pytestmark = pytest.mark.wide


def test_clients_speak_tls_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).public("127.0.0.1")
    trusted = httpx.Client(verify=ssl.create_default_context(cafile=tmp_path / "ca.pem"))
    with started(tmp_path, "--threads", "1", "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)) as up:
        url = up.find(r"OpenAI API +(https://\S+)")
        with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60, http_client=trusted) as client:
            said = client.completions.create(model="coppice-demo", prompt="What does sorted do?", max_tokens=4)
        assert said.choices[0].text
        assert CliRunner().invoke(app, ["health", url.removesuffix("/v1")]).exit_code == 0
        ctrl_c_leaves_nothing_running(up)


def test_a_wrong_certificate_ends_it_with_a_word(tmp_path: Path) -> None:
    certificate, _ = Authority(tmp_path).public("127.0.0.1")
    wrong = started(tmp_path, "--ssl-certfile", str(certificate), "--ssl-keyfile", str(certificate))
    with pytest.raises(AssertionError, match=r"is not the key of .*public\.pem"), wrong:
        pass
