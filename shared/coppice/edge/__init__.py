"""What touches the network: sessions over TCP, codecs, servers."""

import os

# gRPC's core writes lines of its own to stderr for errors that reach us as exceptions and are told in our own words.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
