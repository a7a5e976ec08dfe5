"""Commands: train, measure, prepare data, score, report, export, plan.

Whatever a person or a file got wrong is a `UserError`, raised where it is noticed; it ends a
command with one line and status 2 (`launch.cli:run`).
"""
