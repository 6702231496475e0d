"""The commands of `bcctl`: `bcctl join-tokens …` is the attribute `command` of the module `join_tokens`.

They are imported when they are used, and import trio and HTTP only when they run.
"""
