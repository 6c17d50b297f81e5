"""With TLS a line of the audit log names the certificate of who asked; who was refused for its role has one, too."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from coppice.edge.grpc_tls import open_channel
from coppice.tls.identity import Role
from coppice_rpc.v1 import cache_admin_pb2 as pb
from tests.fakes.cache.cache_ends import Cache
from tests.fakes.certificates import Authority
from tests.fakes.waiting import WAIT_S, wait_for

Keep = Callable[[Any], Any]
UNPIN = "/coppice_rpc.v1.PrefixIndexAdmin/Unpin"


def test_who_asks_is_named_by_its_certificate(keep: Keep, tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    authority = Authority(tmp_path)
    files = authority.files("cache", "c0")
    tls = {"tls_cert": str(files.certificate), "tls_key": str(files.key), "tls_ca": str(files.ca)}
    cache = keep(Cache(audit_log=str(log), **tls))

    for name, role in (("ann", Role.OPERATOR), ("w0", Role.WORKER), ("w0", Role.WORKER)):
        credentials = authority.credentials(role, name)
        with open_channel(f"127.0.0.1:{cache.admin_port}", credentials, server=Role.CACHE) as channel:
            unpin(channel)
        connection = http.client.HTTPSConnection(
            "127.0.0.1", cache.http_port, context=credentials.client_context(), timeout=WAIT_S
        )
        connection.request("DELETE", "/v1/pins/none")
        connection.getresponse().read()
        connection.close()

    wait_for(lambda: len(log.read_text().splitlines()) >= 5, "the last line, written after its answer")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    ann, worker = "coppice://operator/ann", "coppice://worker/w0"
    assert [(line["by"], line["via"], line["verb"], line.get("code", "")) for line in lines] == [
        (ann, "gRPC", "unpin", ""),
        (ann, "REST", "unpin", "404"),
        (worker, "gRPC", "unpin", "PERMISSION_DENIED"),  # told once, however often it asks
        (worker, "REST", "unpin", "403"),
        (worker, "REST", "unpin", "403"),
    ]


def unpin(channel: grpc.Channel) -> None:
    call = channel.unary_unary(UNPIN, pb.UnpinRequest.SerializeToString, pb.UnpinResponse.FromString)
    try:
        call(pb.UnpinRequest(name="none"), timeout=WAIT_S)
    except grpc.RpcError:
        pass
