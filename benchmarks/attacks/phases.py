"""What is done to the victim, and what the attacker must have been told to have done it.

An attack that is refused before it reaches what it attacks shows nothing: each phase says what the attacker has to
hear, and how often in a round.

    told     `200`, `400 CODE PARAM`           an answer over REST; code and param of its error
             `Generate INVALID_ARGUMENT`       an answer over gRPC
             `held`, `answered 200`, `closed`  a connection that was opened and sent what it had to; what it was told
                                               at first; that the server closed it
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

PLAIN, TLS = "plain", "tls"  # doors


@dataclass(frozen=True, slots=True)
class Phase:
    """`proof`: patterns of what is told, each with the least number of it in a round. `door`: who is attacked."""

    proof: dict[str, int] = field(default_factory=dict)
    door: str = PLAIN


_CONTEXT = "400 context_length_exceeded max_tokens"  # found out when the prompt has been read
PHASES = {
    "calm": Phase(),
    "fair": Phase({"200": 10}),
    "full": Phase({"answered 200": 60}),
    "texts": Phase({"200": 1}),
    "ids": Phase({_CONTEXT: 10}),
    "refused": Phase({r"400 \S+ temperature": 50, _CONTEXT: 50}),
    "strangers": Phase({"401 .*": 50}),
    "answers": Phase({"200": 1}),
    "bodies": Phase({"held": 100}),
    "unread": Phase({"answered 200": 60}),
    "idle": Phase({"held": 900}),
    "grammars": Phase({"200": 3, "400 invalid_output_format .*": 3}),
    "wrong_grammars": Phase({"400 invalid_output_format .*": 20}),
    "grpc_silent": Phase({"called": 1_000, "Generate RESOURCE_EXHAUSTED": 1}),
    "grpc_flood": Phase({"Generate INVALID_ARGUMENT": 50, "Detokenize INVALID_ARGUMENT": 50, "Tokenize OK": 10}),
    "calm_tls": Phase(door=TLS),
    "fair_tls": Phase({"200": 10}, door=TLS),
    "handshakes": Phase({"held": 900}, door=TLS),
    "hellos": Phase({"shaken": 100}, door=TLS),
}
CALM = {PLAIN: "calm", TLS: "calm_tls"}
FAIR = {PLAIN: "fair", TLS: "fair_tls"}
FULL = {PLAIN: "full"}  # the same with steps as full as the attacker may make them
ATTACKS = tuple(name for name in PHASES if name not in CALM.values())


def missed(name: str, told: Counter[str], rounds: int) -> list[str]:
    """What the attacker should have been told and was not; empty when it reached what it attacks."""
    found = []
    for pattern, at_least in PHASES[name].proof.items():
        count = sum(number for what, number in told.items() if re.fullmatch(pattern, what))
        if count < at_least * rounds:
            found.append(f"{name}: {count} times {pattern!r}, where {at_least * rounds} would show that it got there")
    return found
