"""The whole stack on one machine, for development, or on a Ray cluster: `coppice up`.

    options ──► needs ──► host ──► places ──► plan ──► supervisor ──► child, child, ...
    (what a     (ports,   (this    (addresses, (argv)  (order, restarts,   │    each: tether ──exec──► the real process
    user says)  files)    machine, folders)            stopping)           └── probe: gRPC health, or PING for Valkey
                          Ray)

The parent owns nothing that serves a request: kill it and the children go too; kill a child and it comes back.
"""
