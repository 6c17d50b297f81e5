"""The three cores in one process, in virtual time, from one seed.

    base/           virtual time, connections that lose, double, delay and break, and both ends of a session over them
    hosts/          one process each: a core, its links, its crashes and pauses; and the honest model that a worker runs
    traffic/        tenants, what they ask, and what they want beside tokens
    nemesis.py      which faults happen when
    oracle.py       what must hold between the cores, after every event and in the end
    world.py        all of it together; run.py starts it, command.py starts many, shrink.py makes a broken one smaller
    mutants/        the cores with one protection taken away

Everything is a function of the seed: a failure prints it and replays exactly.
"""
