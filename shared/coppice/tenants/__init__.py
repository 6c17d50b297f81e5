"""Tenants: who may call, and how much of each worker's KV blocks is theirs.

    credential --sha256--> ApiKey --> Tenant --> DomainId       tenant/<id>      mode private, strict, disabled
                                                                group/<name>     mode {shared: <name>}

A domain is what prefixes are shared within; it comes from the credential and from nothing else. The file holds digests
of keys, never keys. `deploy/tenants.example.yaml` explains each field.
"""
