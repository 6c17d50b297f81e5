"""How the demo model is made: text, tokenizer, network, training, measurement.

    corpus ──► formats ──► tokenizer ──► train ──► export ──► shared/coppice/demo_model/
       │                                   │
       └── held-out documents ─────────────┴──► evaluate ──► demo/results.json

Nothing that serves requests imports this package; it is run by hand with `python -m demo.train`.
"""
