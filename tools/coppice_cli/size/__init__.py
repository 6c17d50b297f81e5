"""`coppice size`: what a model's weights and KV take, how many blocks fit, how many requests run at once.

arithmetic.py   the worker's own sums, before there is a worker        command.py   flags and what is printed
"""
