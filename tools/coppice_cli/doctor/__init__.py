"""`coppice doctor`: whether a stack would run here, and what to do where not.

    findings.py   what a check says          machine.py    files, memory, clock
    software.py   versions, compiler, GPU    services.py   ports, Redis        command.py   flags, and what is printed

Nothing is asked over a network but the Redis that the user named.
"""
