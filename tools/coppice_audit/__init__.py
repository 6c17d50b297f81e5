"""`coppice audit isolation`: can one tenant of a running server tell what another one has sent?

It asks as any client does, over the OpenAI API, with the keys of two tenants, and judges by tests with known error.

    core/           trials and prompts (plan.py), tests (statistics.py), the verdict (judge.py)
    preflight.py    is there a server, does it take both keys, how long is a word
    server.py       sends prompts, keeps times and facts; facts.py: what an answer says beside its text
    measure.py      runs the trials
    report.py       table, JSON; plot.py: the picture
    run.py          all of it, and exit codes; watch.py: again and again, with metrics
"""
