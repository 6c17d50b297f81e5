"""`coppice top`: who runs, waits and holds memory, now.

samples.py   one look at each service         rates.py   samples to rows: rates and shares
view.py      rows to tables                   command.py flags, and again and again
"""
