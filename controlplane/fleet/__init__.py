"""Nodes: how they get an identity, and what becomes of them.

* `pki`: the certificates that we issue, and the three CAs that keep their holders apart
* `keys`: the directory of private keys, cut by the process that may read each part
"""
