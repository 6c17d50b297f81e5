"""Nodes of a Ray cluster as a host: `coppice up --on ray://HEAD`. Nothing else imports Ray.

    this process                            a node                       another node
    supervisor ─ RayChild ─── calls ──────► Agent ──► child process      Agent ──► child process
                 (what was heard last)      (actor)   cache, scheduler   (actor)   worker

An agent is told what to start and says how it stands: commands, addresses, lines of logs. Tokens, prompts and KV go
between the child processes over their own sessions. A child is tied to its agent, and an agent ends with its raylet
or with the process that asked for it, so whatever dies, nothing is left running.
"""
