"""The three cores in one process, in virtual time, from one seed.

    timeline.py     events in virtual time
    network.py      connections that lose, double, delay and break
    links.py        both ends of a session over such connections
    *_host.py       one process each: a core, its links, its crashes and pauses
    kv_honest.py    a model that turns any wrong read into a wrong token
    workload.py     tenants and what they ask
    nemesis.py      which faults happen when
    oracle.py       what must hold between the cores, after every event and in the end
    world.py        all of it together; run.py starts it

Everything is a function of the seed: a failure prints it and replays exactly.
"""
