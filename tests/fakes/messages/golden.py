"""Files of the session protocol's versions that are spoken: `tests/contract/links/versions/golden/vN`.

    frames.json   a frame of each message, in hexadecimal, by channel
    shapes.json   the fields of each record and the values of each enum, by channel

`python -m tests.fakes.messages.golden` writes the folder of the newest version, and what a planner, its
front doors and their parent say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coppice.edge.codec import Edge
from coppice.session.versions import PROTOCOL_VERSION
from tests.fakes.message_values import CODECS, golden_values
from tests.fakes.messages.shapes import Enums, Fields, OlderCodec, older_edge, shape_of

FOLDER = Path(__file__).parents[2] / "contract" / "links" / "versions" / "golden"
DOORS = "doors.json"  # between processes of a scheduler: one build speaks on both ends
SESSIONS = [channel for channel in CODECS if " from " in channel]
Frames = dict[str, dict[str, str]]


def frames_of(version: int) -> Frames:
    found: Frames = json.loads((FOLDER / f"v{version}" / "frames.json").read_text())
    return found


def shapes_of(version: int) -> tuple[dict[str, Fields], Enums]:
    found = json.loads((FOLDER / f"v{version}" / "shapes.json").read_text())
    return found["records"], found["enums"]


def older(edge: Edge, version: int) -> Edge:
    """An end of a session in a process of that version."""
    return older_edge(edge, version, *shapes_of(version))


def older_codec(channel: str, version: int) -> OlderCodec:
    records, enums = shapes_of(version)
    return OlderCodec(CODECS[channel], records[channel], enums)


def encoded(channels: list[str]) -> Frames:
    return {
        channel: {name: CODECS[channel].encode(value).hex() for name, value in golden_values(CODECS[channel]).items()}
        for channel in channels
    }


def shapes() -> dict[str, Any]:
    found = {channel: shape_of(CODECS[channel].kinds) for channel in SESSIONS}
    enums = {name: values for _, of_channel in found.values() for name, values in of_channel.items()}
    return {"records": {channel: records for channel, (records, _) in found.items()}, "enums": enums}


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    folder = FOLDER / f"v{PROTOCOL_VERSION}"
    write(folder / "frames.json", encoded(SESSIONS))
    write(folder / "shapes.json", shapes())
    write(FOLDER / DOORS, encoded([channel for channel in CODECS if channel not in SESSIONS]))


if __name__ == "__main__":
    main()
