"""Programs that people have, in an environment of their own, against the whole stack."""
