"""The whole stack on one machine, for development: `coppice up`.

    options ──► plan ──► supervisor ──► child, child, ...      each: tether ──exec──► the real process
    (what a     (argv,   (order, restarts,    │
    user says)  ports)   stopping)            └── probe: gRPC health, or PING for Valkey

The parent owns nothing that serves a request: kill it and the children go too; kill a child and it comes back.
"""
