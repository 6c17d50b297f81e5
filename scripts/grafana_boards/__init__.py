"""The Grafana boards of deploy/grafana: what each panel asks is said here once, and the JSON is written from it.

overview --tenant--> tenants       $tenant
    \\-----worker--> workers       $worker      KV blocks, cache, steps
"""
