"""Runs in a container where the OpenTelemetry Collector would: prints each span that it is sent as a line of JSON."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

import grpc
from collector import Collector  # tests/fakes/telemetry/collector.py, mounted beside this file

stopping = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopping.set())
tls = Path("/etc/coppice/tls")
pair = (tls / "key.pem").read_bytes(), (tls / "cert.pem").read_bytes()
credentials = grpc.ssl_server_credentials([pair], (tls / "ca.pem").read_bytes(), require_client_auth=True)
collector = Collector("0.0.0.0:4317", credentials)
printed = 0
while not stopping.wait(0.1):
    for span in collector.spans[printed:]:
        client = span.attributes.get("coppice.client.trace_id", "")
        line = {"trace_id": span.trace_id, "client": client, "service": span.service, "name": span.name}
        print(json.dumps(line), flush=True)
        printed += 1
collector.close()
sys.exit(0)
