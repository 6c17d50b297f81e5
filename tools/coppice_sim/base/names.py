"""Names that every part of a simulated world uses."""

from __future__ import annotations

from coppice.ids import Namespace

NAMESPACE = Namespace(b"honest model")
