"""`bcctl`, the command line.

main       the tree, and what every command ends in: exit status, errors, hints
options    building blocks of commands: lazy groups, common options, typed amounts
session    one run: the common options, requests, showing answers, Ctrl-C
client     the API over HTTP; also for programs
profiles   which server, and as whom
render     tables, records, JSON, --query
amounts    durations, sizes and times as people write them
progress   what a terminal shows while something is awaited
commands   one module for each name at the top of the tree

Only dev, serve and db touch the server's own parts; all else talks to the API.
"""
