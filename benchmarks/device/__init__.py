"""What only a device can say, by one command: `python -m benchmarks.device`.

A job is one question, asked in a process of its own: an illegal access, a hang or a
refusal spoils the line of one job. `right`, `fast`, `true` and `steps` hold the jobs,
`runner` runs them, `results` keeps their lines, `table` makes the list of kernels that
`implementation=None` takes.
"""
