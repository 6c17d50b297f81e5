"""A stand-in for any of the three services: takes their flags, answers gRPC health, misbehaves on request.

`python -m tests.fakes.cache.service NAME [--grpc-port P] [--port P] [...]`. `COPPICE_FAKE_<NAME>` says how:
`dies` before it is ready, `crashes` soon after, every time, `deaf` ignores SIGTERM and has a child that does so too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from coppice.edge.grpc_server import GrpcServer
from coppice.edge.signal_event import SignalEvent


def main() -> int:
    name = sys.argv[1]
    flags = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    mood = os.environ.get(f"COPPICE_FAKE_{name.upper()}", "")
    print(f"fake {name} starts", flush=True)
    if mood == "dies":
        print(f"coppice {name}: the disk is on fire", file=sys.stderr, flush=True)
        return 1
    stopping = SignalEvent()
    if mood == "deaf":
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", deaf, *sys.argv])
    handler = signal.SIG_IGN if mood == "deaf" else lambda *_: stopping.set()
    signal.signal(signal.SIGTERM, handler)
    server = GrpcServer(f"{flags['--host']}:{flags['--grpc-port']}", (), None, name)
    server.start()
    server.set_ready(True)
    if mood == "crashes":
        stopping.wait(0.4)
        return 3
    stopping.wait()
    print(f"fake {name} stops", flush=True)
    server.stop(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
