"""Who is asking, may they, and whose records may they see.

port       what the core asks of an IAM, whichever it is
gate       caches, deadlines and counters around it; the only way to it
catalog    actions and resource types
embedded   the IAM that comes with Better Compute: API keys, tenants, roles
roles      its policy, pure
bootstrap  the first tenant and key
"""
