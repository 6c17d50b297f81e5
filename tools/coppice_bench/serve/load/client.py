"""One client process: the part of a load that falls to it, told on the way.

`python -m coppice_bench.serve.load.client` takes its part from stdin, one line of JSON, and prints lines of JSON:

    in:   {"options": {...}, "model": {...}, "salt": n, "process": n, "floods": true}
    out:  {"ready": clipped}
    in:   the moment to start at, on the machine's monotonic clock
    out:  [a record] ...
    out:  {"cpu_s": seconds of processor time since the start}
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coppice_bench.serve.load.driver import Driver, OnRecord
from coppice_bench.serve.load.http import Endpoint, HttpClient
from coppice_bench.serve.load.prompts import Bodies, Content, Model
from coppice_bench.serve.load.rates import Loads
from coppice_bench.serve.options import ServeOptions, TenantKey


@dataclass(frozen=True, slots=True)
class Part:
    """What one process needs to know. `floods` is off while the others are measured alone."""

    options: ServeOptions
    model: Model
    salt: int
    process: int = 0
    floods: bool = True

    def to_json(self) -> str:
        options = asdict(self.options)
        options["trace"] = str(self.options.trace) if self.options.trace else None
        return json.dumps({**{name: getattr(self, name) for name in ("salt", "process", "floods")},
                           "options": options, "model": asdict(self.model)})  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> Part:
        found = json.loads(text)
        options: dict[str, Any] = found.pop("options")
        options["trace"] = Path(options["trace"]) if options["trace"] else None
        options["tenants"] = tuple(TenantKey(**tenant) for tenant in options["tenants"])
        return cls(options=ServeOptions(**options), model=Model(**found.pop("model")), **found)

    def of_process(self, process: int) -> Part:
        return replace(self, process=process)


class Client:
    """Prepares the jobs of a part; `run` sends them."""

    def __init__(self, part: Part, on_record: OnRecord) -> None:
        options = part.options
        content = Content(part.salt, part.model, as_ids=options.sends_token_ids)
        loads = Loads(options, content, part.model.context, part.process)
        self._lanes = [lane for lane in loads.lanes() if part.floods or not lane.is_flood]
        self.num_clipped = loads.num_clipped
        self._driver = Driver(
            HttpClient(Endpoint.parse(options.url)),
            Bodies(part.model.name, options.api, options.temperature),
            options.senders,
            on_record,
            timeout_s=options.timeout_s,
        )
        self._jobs = [(lane, self._driver.prepare(lane)) for lane in self._lanes]

    async def run(self, start_s: float) -> float:
        """Seconds of processor time that it took, of which nothing was spent on preparing."""
        await asyncio.sleep(max(0.0, start_s - time.monotonic()))
        began_s = time.process_time()
        await self._driver.run(self._jobs)
        return time.process_time() - began_s


def main() -> int:
    def tell(value: Any) -> None:
        print(json.dumps(value, separators=(",", ":")), flush=True)

    client = Client(Part.from_json(sys.stdin.readline()), lambda record: tell(record.as_list()))
    tell({"ready": client.num_clipped})
    tell({"cpu_s": asyncio.run(client.run(float(sys.stdin.readline())))})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # what was told stands
