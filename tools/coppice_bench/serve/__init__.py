"""`coppice bench serve`: a load on any server of the OpenAI API, and what it made of it.

options -> loads: lanes of jobs -> driver (in one process or several) -> records -> report, plot
"""
